"""Engine makers, one backend each, behind one interface; every build runs in a child process."""
