"""What gpu_check knows of the machine: its GPU, by the driver alone, and where
CUDA's shared libraries are."""

import ctypes
import glob
import os
import shutil
import subprocess
import sys

# Of the driver API: CUdevice_attribute.
SM_COUNT, MAJOR, MINOR = 16, 75, 76
CUDA = 13000  # what the binaries are built with
# What the binaries load, and how `lib` is asked for its version.
LIBRARIES = {
    "libcublasLt.so.13": "lib.cublasLtGetVersion()",
    "libcudnn.so.9": "lib.cudnnGetVersion()",
    "libnccl.so.2": "lib.ncclGetVersion(byref(a)) or a.value",
    "libnvrtc.so.13":
        "lib.nvrtcVersion(byref(a), byref(b)) or '%d.%d' % (a.value, b.value)"}
DRIVER_FOLDERS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib",
                  "/usr/lib64-nvidia", "/usr/lib/wsl/lib")
PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", "/opt/*/bin/python3",
           "/opt/*/.venv/bin/python3", "/opt/*/venv/bin/python3")


def output(command, seconds=20, environment=None):
    """What a program printed; "" where it failed."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True,
                              timeout=seconds, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def open_driver():
    """libcuda, or None."""
    names = ["libcuda.so.1"]
    names += [os.path.join(folder, "libcuda.so.1") for folder in DRIVER_FOLDERS]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def pythons():
    """Every python3 on PATH and in the usual places, each once."""
    found = [os.path.join(folder, "python3")
             for folder in os.environ.get("PATH", os.defpath).split(":")]
    for pattern in PYTHONS:
        found += sorted(glob.glob(pattern))
    # A virtual environment's python3 is a link to one that has other packages.
    return list(dict.fromkeys(
        path for path in found if os.access(path, os.X_OK)))


def wheel_folders(packages):
    """The folders of libraries in NVIDIA's wheels. Leaves out those of CUDA 12:
    their cuDNN and NCCL have the same names but do not fit CUDA 13's programs.
    """
    found = sorted(glob.glob(os.path.join(packages, "nvidia/*/lib")))
    if os.path.isdir(os.path.join(packages, "nvidia/cu13")) or any(
            os.path.exists(os.path.join(folder, "libcublasLt.so.13"))
            for folder in found):
        return found
    return [folder for folder in found if
            os.path.basename(os.path.dirname(folder)) not in ("cudnn", "nccl")]


def site_packages(python):
    """Folders with this python's packages."""
    code = ("import site, sysconfig; print('\\n'.join("
            "site.getsitepackages() + [sysconfig.get_paths()['purelib'], "
            "site.getusersitepackages()]))")
    return output([python, "-c", code]).splitlines()


def cuda_homes():
    """Toolkits: the chosen one, then the others, newest first."""
    return ["/usr/local/cuda"] + sorted(glob.glob("/usr/local/cuda-*"),
                                        reverse=True)


class Machine:
    def __init__(self, root):
        self.root = root
        self.driver = None
        self._python = None
        self._folders = None

    def problem(self):
        """Why there is no GPU to use, or None."""
        if not glob.glob("/dev/nvidia[0-9]*") and not os.path.exists(
                "/dev/dxg"):
            return "no /dev/nvidia0"
        self.driver = open_driver()
        if self.driver is None:
            return "no libcuda.so.1: the driver is not installed"
        code = self.driver.cuInit(0)
        if code != 0:
            return "cuInit fails with %d" % code
        count = ctypes.c_int()
        if self.driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
            return "the driver shows no device"
        return None

    def driver_version(self):
        """The driver's CUDA version, 13000 for 13.0; 13000 if unknown."""
        version = ctypes.c_int(CUDA)
        if self.driver is not None:
            self.driver.cuDriverGetVersion(ctypes.byref(version))
        return version.value

    def attribute(self, device, which):
        value = ctypes.c_int()
        self.driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
        return value.value

    def info(self):
        """The first GPU. REQUIRES: problem() is None."""
        device, count = ctypes.c_int(), ctypes.c_int()
        memory, version = ctypes.c_size_t(), self.driver_version()
        name = ctypes.create_string_buffer(256)
        self.driver.cuDeviceGet(ctypes.byref(device), 0)
        self.driver.cuDeviceGetCount(ctypes.byref(count))
        self.driver.cuDeviceGetName(name, len(name), device)
        self.driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        query = ["nvidia-smi", "--query-gpu=driver_version",
                 "--format=csv,noheader", "-i", "0"]
        return {"name": name.value.decode(), "gpus": count.value,
                "memory_bytes": memory.value,
                "multiprocessors": self.attribute(device, SM_COUNT),
                "compute_capability": "%d.%d" % (
                    self.attribute(device, MAJOR),
                    self.attribute(device, MINOR)),
                "driver": output(query).strip() or "unknown",
                "driver_cuda": "%d.%d" % (version // 1000,
                                          version % 1000 // 10),
                "cores": len(os.sched_getaffinity(0))}

    def folders(self):
        """Where shared libraries are looked for, in this order."""
        if self._folders is None:
            found = [os.path.join(self.root, "lib")]
            if self.driver_version() < CUDA:
                # NVIDIA's newer user-mode driver over an older kernel's.
                found += sorted(glob.glob("/usr/local/cuda*/compat"))
            found += os.environ.get("LD_LIBRARY_PATH", "").split(":")
            for python in pythons():
                for packages in site_packages(python):
                    found += wheel_folders(packages)
            for home in cuda_homes():
                found.append(os.path.join(home, "lib64"))
            found += DRIVER_FOLDERS
            self._folders = list(dict.fromkeys(
                folder for folder in found if folder and
                os.path.isdir(folder)))
        return self._folders

    def find(self, name):
        for folder in self.folders():
            path = os.path.join(folder, name)
            if os.path.exists(path):
                return path
        return None

    def libraries(self):
        """{name: {"path", "version"}}; path None: left to the system."""
        found = {}
        for name, question in LIBRARIES.items():
            path = self.find(name)
            version = self.version(path or name, question)
            found[name] = {"path": path, "version": version}
        return found

    def version(self, path, question):
        """In a process of its own: it loads the library."""
        code = ("from ctypes import CDLL, byref, c_int; a, b = c_int(), c_int()"
                "; lib = CDLL(%r); print(%s)" % (path, question))
        environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(
            self.folders())}
        return output([sys.executable, "-c", code],
                      environment=environment).strip() or None

    def python(self):
        """The python3 that has PyTorch, else any."""
        if self._python is None:
            found = pythons()
            with_torch = [python for python in found if output(
                [python, "-c", "import importlib.util as u; "
                 "print(u.find_spec('torch') or '')"]).strip()]
            self._python = (with_torch or found or ["python3"])[0]
        return self._python

    def environment(self):
        """Of the programs that are started. PyTorch brings its own libraries:
        it has the old LD_LIBRARY_PATH."""
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(self.folders()),
                "GPU_CHECK_PYTHON": self.python(),
                "GPU_CHECK_PYTHON_LIBRARIES": os.environ.get(
                    "LD_LIBRARY_PATH", "")}


def compute_sanitizer():
    """Its path, or None."""
    found = [shutil.which("compute-sanitizer")]
    for home in cuda_homes():
        found += [os.path.join(home, "bin/compute-sanitizer"),
                  os.path.join(home, "compute-sanitizer/compute-sanitizer")]
    return next((path for path in found if path and os.access(path, os.X_OK)),
                None)
