"""Rewrites: mods that prove themselves on data, and the precision transforms that honour a plan."""
