"""A fuzzer of everything that is read from outside: models, run files, rows, documents of runs and bundles.

`python -m tests.fuzz --inputs 10000 --seed 1` writes that many inputs and hands each to the package. An input
may be accepted, or refused by an error of `loka_onnx.errors`. All else is a fault: another exception, an
internal error, a message of more than `LONGEST_MESSAGE` characters, outputs that are not those of the
model, a file that was touched outside, a process that died, and more than 30 s.
"""
