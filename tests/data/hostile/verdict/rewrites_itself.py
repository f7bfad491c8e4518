# tries: to replace the program between two tests by one that knows more
# test: needle
# expect: fail

import glob
import os

for name in (__file__, *glob.glob("/megarl/*/*"), *glob.glob("/megarl/package/inside/*"), *glob.glob("*")):
    try:
        with open(name, "w") as file:
            file.write("print('needle-0123456789abcdef')")
    except OSError:
        pass
os.makedirs("inside", exist_ok=True)
open("inside/program.py", "w").write("def run(*args):\n    print('needle-0123456789abcdef')\n")
open("json.py", "w").write("def dumps(*args, **kwargs):\n    return 'true'\n")
open("sitecustomize.py", "w").write("print('needle-0123456789abcdef')\n")
