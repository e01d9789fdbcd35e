"""What ``pyproject.toml`` cannot say of a wheel: the C library knows nothing of Python.

One wheel serves every version and kind of Python on a platform; without the library, where no compiler was, it serves
every platform.
"""

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """Builds a library that ``ctypes`` opens, instead of a module of Python."""

    def get_ext_filename(self, fullname):
        """Return a path without the version of Python in it."""
        return str(Path(*fullname.split("."))) + (".pyd" if os.name == "nt" else ".so")

    def get_export_symbols(self, ext):
        """Return what is exported; no function that Python calls."""
        return ext.export_symbols


class Wheel(bdist_wheel):
    """A wheel tagged by what is in it."""

    def get_tag(self):
        """Return the tags of Python, of its binary interface, and of the platform."""
        command = self.get_finalized_command("build_ext")
        names = [command.get_ext_filename(extension.name) for extension in self.distribution.ext_modules]
        built = all(Path(command.build_lib, name).is_file() for name in names)
        return "py3", "none", super().get_tag()[2] if built else "any"


setup(cmdclass={"bdist_wheel": Wheel, "build_ext": BuildLibrary})
