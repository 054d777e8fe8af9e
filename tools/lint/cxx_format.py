"""clang-format 14 would change nothing."""

import os
import re
import shutil
import subprocess

# Other versions break lines elsewhere: the check would pass on one machine
# and fail on the next.
VERSION = "14"


def _program():
    for name in ("clang-format-" + VERSION, "clang-format"):
        if shutil.which(name):
            text = subprocess.run([name, "--version"], capture_output=True,
                                  text=True).stdout
            if re.search(r"version %s\." % VERSION, text):
                return name
    return None


def check(tree):
    program = _program()
    if program is None:
        yield ("clang-format %s is not installed; apt-get install "
               "clang-format-%s" % (VERSION, VERSION))
        return
    command = [program] + (["-i"] if tree.fix else [
        "--dry-run", "-Werror", "--ferror-limit=1"])
    files, jobs = tree.cxx(), os.cpu_count()
    running = [subprocess.Popen(command + files[i::jobs], cwd=tree.root,
                                stderr=subprocess.PIPE, text=True)
               for i in range(min(jobs, len(files)))]
    output = "".join(process.communicate()[1] for process in running)
    for name, line in sorted(set(re.findall(r"^(\S+?):(\d+):\d+: error",
                                            output, re.M))):
        yield "%s:%s: not formatted; run `ninja format`" % (name, line)
    if "error" in output and not re.search(r":\d+:\d+: error", output):
        yield output.strip()
