"""What runs inside a sandbox: the supervisor and the untrusted program, standard library only, Python 3.8 or newer.

This folder is shown to the sandbox's interpreter as the package `inside`, without the rest of megarl. Nothing in it
is trusted by the other side: what a program can do to these files' state, it can only do to its own answers.
"""
