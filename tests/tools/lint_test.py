"""Every lint can fail: a small correct tree, then one seeded violation each."""

import os
import shutil
import subprocess
import tempfile
import unittest

LINT = os.path.abspath("tools/lint/lint")

SOUND = {
    "build.ninja": """include out/machine.ninja
subninja kernels/room.ninja
subninja kernels/cuda-$cuda.ninja
subninja engine/room.ninja
subninja tests/room.ninja
build check: phony
""",
    "LICENSE": "MIT\n",
    ".clang-format": "BasedOnStyle: Google\n",
    "README.md": """# sound
```sh
tools/go --fast   # a comment
out/zero train configs/a.json --steps 3
X=1 ninja -j2 check && \\
  tools/go
```
```json
not/a/command
```
""",
    "configs/a.json": "{}\n",
    "tools/go": "#!/bin/sh\n",
    "tools/rooms.txt": """room kernels ->       # lowest
room kernels/cpu -> kernels
room engine/base -> kernels
room tests -> *
heavy dnnl in kernels/cpu/
heavy nlohmann/ in sources
""",
    "kernels/room.ninja": """build $o/obj/kernels/a.o: cxx kernels/a.cc
build $o/lib/kernels.a: archive $
    $o/obj/kernels/a.o $
    $o/lib/kernels_cuda.a
""",
    "kernels/cuda-on.ninja": "",
    "kernels/cuda-off.ninja": "",
    "kernels/a.h": """#ifndef ZERO_KERNELS_A_H_
#define ZERO_KERNELS_A_H_

int A();

#endif  // ZERO_KERNELS_A_H_
""",
    "kernels/a.cc": '#include "kernels/a.h"\n\nint A() { return 1; }\n',
    "engine/room.ninja": """build $o/obj/engine/base/b.o: cxx engine/base/b.cc
build $o/lib/engine.a: archive $o/obj/engine/base/b.o
""",
    "engine/base/b.cc": '#include <nlohmann/json.hpp>\n\n'
                        '#include "kernels/a.h"\n',
    "tests/room.ninja": """build $o/obj/tests/a_test.o: cxx tests/a_test.cc
build $o/tests/a_test: link $o/obj/tests/a_test.o $o/lib/kernels.a
build $o/tests/a_test.ok: run_test $o/tests/a_test
build $o/tests/b_test.ok: run_python_test tests/b_test.py | $o/zero
""",
    "tests/a_test.cc": '#include "kernels/a.h"\n',
    "tests/b_test.py": "",
}

ZERO = """#!/bin/sh
[ "$1" = train ] && echo "--steps N  --config FILE" && exit 0
exit 1
"""


class LintTest(unittest.TestCase):
    def setUp(self):
        self.root = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.root)
        for name, text in SOUND.items():
            self.write(name, text)
        self.write("out/zero", ZERO)
        for program in ("out/zero", "tools/go"):
            os.chmod(os.path.join(self.root, program), 0o755)

    def write(self, name, text):
        path = os.path.join(self.root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as f:
            f.write(text)

    def edit(self, name, old, new):
        self.assertIn(old, SOUND[name])
        self.write(name, SOUND[name].replace(old, new))

    def lint(self, check):
        done = subprocess.run([LINT, "--root", self.root, check],
                              capture_output=True, text=True)
        self.assertEqual(done.stderr, "")
        return done.returncode, done.stdout

    def assert_complains(self, check, where, what):
        code, output = self.lint(check)
        self.assertEqual(code, 1, "the seeded violation passed")
        self.assertTrue(output.startswith(where), output)
        self.assertIn(what, output)
        self.assertIn("lint: 1 complaints", output)

    def test_a_sound_tree_passes_every_check(self):
        for check in ("format", "headers", "layout", "readme", "rooms",
                      "sources"):
            self.assertEqual(self.lint(check), (0, ""), check)

    # rooms

    def test_rooms_refuses_an_include_against_the_arrows(self):
        self.write("engine/base/b.h", "")
        self.edit("kernels/a.cc", "\n\n", '\n#include "engine/base/b.h"\n\n')
        self.assert_complains("rooms", "kernels/a.cc:2:",
                              "kernels may not include engine/base")

    def test_rooms_refuses_the_interface_including_its_backend(self):
        self.write("kernels/cpu/c.h", "")
        self.edit("kernels/a.cc", "\n\n", '\n#include "kernels/cpu/c.h"\n\n')
        self.assert_complains("rooms", "kernels/a.cc:2:",
                              "kernels may not include kernels/cpu")

    def test_rooms_refuses_a_file_in_no_room(self):
        self.write("engine/new/x.h", "")
        self.assert_complains("rooms", "engine/new/x.h:1:", "in no room")

    def test_rooms_refuses_an_include_that_does_not_exist(self):
        self.edit("kernels/a.cc", "\n\n", '\n#include "kernels/gone.h"\n\n')
        self.assert_complains("rooms", "kernels/a.cc:2:", "no such file")

    def test_rooms_refuses_a_path_relative_to_the_file(self):
        self.edit("kernels/a.cc", '"kernels/a.h"', '"a.h"')
        self.assert_complains("rooms", "kernels/a.cc:1:", "from the top")

    def test_rooms_refuses_an_arrow_to_no_room(self):
        self.edit("tools/rooms.txt", "kernels/cpu -> kernels",
                  "kernels/cpu -> kernel")
        self.assert_complains("rooms", "tools/rooms.txt:", "is no room")

    # sources

    def test_sources_finds_a_source_that_is_not_built(self):
        self.write("kernels/new/new.cc", "")
        self.assert_complains("sources", "kernels/new/new.cc:1:",
                              "its folder is in no archive")

    def test_sources_finds_a_build_line_without_its_file(self):
        os.remove(os.path.join(self.root, "kernels/a.cc"))
        self.assert_complains("sources", "kernels/room.ninja:1:",
                              "kernels/a.cc: no such file")

    def test_sources_finds_an_object_in_no_archive(self):
        self.edit("kernels/room.ninja", "    $o/obj/kernels/a.o $\n", "")
        self.assert_complains("sources", "kernels/room.ninja:1:",
                              "in no archive")

    def test_sources_finds_a_test_that_nothing_runs(self):
        self.edit("tests/room.ninja",
                  "build $o/tests/a_test.ok: run_test $o/tests/a_test\n", "")
        self.assert_complains("sources", "tests/a_test.cc:1:", "no run_test")

    def test_sources_finds_a_python_test_that_nothing_runs(self):
        self.write("tests/c_test.py", "")
        self.assert_complains("sources", "tests/c_test.py:1:", "no run_test")

    def test_sources_finds_a_room_that_nothing_reaches(self):
        self.write("optim/room.ninja", "")
        self.assert_complains("sources", "optim/room.ninja:1:", "no subninja")

    def test_sources_finds_a_subninja_without_its_file(self):
        self.edit("build.ninja", "build check",
                  "subninja optim/room.ninja\nbuild check")
        self.assert_complains("sources", "build.ninja:6:", "optim/room.ninja")

    # format

    def test_format_finds_a_line_that_clang_format_would_change(self):
        self.write("kernels/a.cc", "int  A( ) {return 1;}\n")
        self.assert_complains("format", "kernels/a.cc:1:", "not formatted")

    # headers

    def test_headers_finds_a_wrong_guard(self):
        self.edit("kernels/a.h", "ZERO_KERNELS_A_H_", "KERNELS_A_H")
        self.assert_complains("headers", "kernels/a.h:1:",
                              "ZERO_KERNELS_A_H_")

    def test_headers_finds_a_guard_that_guards_nothing(self):
        self.edit("kernels/a.h", "#define ZERO_KERNELS_A_H_", "")
        self.assert_complains("headers", "kernels/a.h:1:", "#define")

    def test_headers_wants_highways_toggle_in_an_inl_header(self):
        self.write("kernels/a-inl.h", "#ifndef ZERO_KERNELS_A_INL_H_\n"
                   "#define ZERO_KERNELS_A_INL_H_\n#endif\n")
        self.assert_complains("headers", "kernels/a-inl.h:1:",
                              "HWY_TARGET_TOGGLE")

    def test_headers_finds_a_heavy_header_outside_its_corner(self):
        self.edit("kernels/a.cc", "\n\n", "\n\n#include <dnnl.hpp>\n")
        self.assert_complains("headers", "kernels/a.cc:3:",
                              "belongs in kernels/cpu/")

    def test_headers_finds_a_sources_only_header_in_a_header(self):
        self.edit("kernels/a.h", "int A", "#include <nlohmann/json.hpp>\nint A")
        self.assert_complains("headers", "kernels/a.h:4:", "sources only")

    # layout

    def test_layout_finds_an_entry_outside_the_agreed_list(self):
        self.write("docs/notes.md", "")
        self.assert_complains("layout", "docs:", "top-level")

    def test_layout_finds_a_home_folder_in_a_file(self):
        self.write("tools/go", "cd /" + "home/ada/zero\n")
        self.assert_complains("layout", "tools/go:1:", "machine path")

    # readme

    def test_readme_finds_a_program_that_is_not_there(self):
        self.edit("README.md", "tools/go --fast", "tools/gone")
        self.assert_complains("readme", "README.md:3:", "tools/gone")

    def test_readme_finds_a_config_that_is_not_there(self):
        self.edit("README.md", "configs/a.json", "configs/b.json")
        self.assert_complains("readme", "README.md:4:", "configs/b.json")

    def test_readme_finds_an_unknown_subcommand(self):
        self.edit("README.md", "zero train", "zero trian")
        self.assert_complains("readme", "README.md:4:", "zero trian --help")

    def test_readme_finds_an_unknown_option(self):
        self.edit("README.md", "--steps", "--step")
        self.assert_complains("readme", "README.md:4:", "no option --step")

    def test_readme_finds_an_unknown_ninja_target(self):
        self.edit("README.md", "-j2 check", "-j2 chekc")
        self.assert_complains("readme", "README.md:5:", "no target chekc")

    def test_readme_must_be_there(self):
        os.remove(os.path.join(self.root, "README.md"))
        self.assert_complains("readme", "README.md:", "missing")
