# tries: to leave folders that are hard to remove
# test: sum
# expect: pass

import os

here = os.getcwd()
labyrinth = f"labyrinth{os.getpid()}"
os.mkdir(labyrinth)
os.chdir(labyrinth)
for _ in range(1100):
    os.mkdir("deep")
    os.chdir("deep")
os.chdir(os.path.join(here, labyrinth))
os.mkdir("closed")
open("closed/file", "w").close()
for path, mode in (("closed", 0o000),):
    try:
        os.chmod(path, mode)
    except OSError:
        pass
os.mkdir("born_closed", 0o000)
open(b"\xff\n name", "w").close()
os.symlink("/", "root")
os.symlink("loop", "loop")
print(sum(map(int, input().split())))
