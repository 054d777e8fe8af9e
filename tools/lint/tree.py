"""The files that a lint checks: those that git tracks or would track."""

import os
import subprocess

ROOMS = ("kernels", "optim", "engine", "models", "tools", "tests")
CXX = (".h", ".cc", ".cu", ".cuh")


class Tree:
    def __init__(self, root, zero="out/zero", fix=False):
        self.root = os.path.abspath(root)
        self.zero = zero
        self.fix = fix
        self.files = self._list()

    def _list(self):
        names = self._tracked()
        if names is None:
            names = self._walked()
        # A file deleted but not yet committed is still listed by git.
        return sorted(n for n in set(names)
                      if n and os.path.isfile(self.path(n)))

    def _tracked(self):
        """None if root is not the top of a checkout, or git is missing or
        refuses a checkout with another owner."""
        if not os.path.exists(self.path(".git")):
            return None
        try:
            return subprocess.run(
                ["git", "-C", self.root, "ls-files", "-z", "--cached",
                 "--others", "--exclude-standard"], capture_output=True,
                text=True, check=True).stdout.split("\0")
        except (OSError, subprocess.CalledProcessError):
            return None

    def _walked(self):
        """Everything except what .gitignore names."""
        names = []
        for folder, folders, files in os.walk(self.root):
            folders[:] = [d for d in folders
                          if d not in ("out", ".git", "__pycache__")]
            names += [os.path.relpath(os.path.join(folder, f), self.root)
                      for f in files if f != "compile_commands.json"]
        return names

    def path(self, name):
        return os.path.join(self.root, name)

    def text(self, name):
        with open(self.path(name), errors="replace") as f:
            return f.read()

    def lines(self, name):
        """(number, line) from 1."""
        return enumerate(self.text(name).split("\n"), 1)

    def cxx(self, extensions=CXX):
        return [n for n in self.files
                if n.endswith(extensions) and n.split("/")[0] in ROOMS]
