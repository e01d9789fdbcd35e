"""What ``pyproject.toml`` cannot say of a wheel: the C library knows nothing of Python.

One wheel serves every version and kind of Python on a platform; without the library, where no compiler was, it serves
every platform. Links of the README are relative in a checkout; an index needs whole addresses, or none.
"""

import os
import re
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent


def description(readme, home):
    """Return a README as an index can show it: what is installed from there has a name, and no folder.

    Args:
        readme: Markdown whose links are relative to the root of the checkout.
        home: Address of the repository, without which pictures are left out and links become names of files. On it,
            ``/blob/main/`` shows a file and ``/raw/main/`` is the file.
    """
    readme = re.sub(r"^pip install -e \. .*$", "pip install gradflow-export", readme, flags=re.MULTILINE)
    if home is None:
        readme = re.sub(r"!\[[^]]*\]\((?!https?://)[^)]+\)\n*", "", readme)
        return re.sub(r"\[([^]]+)\]\((?!https?://|#)([^)]+)\)", r"\1 (`\2`)", readme)
    readme = re.sub(r"(!\[[^]]*\])\((?!https?://)([^)]+)\)", rf"\1({home}/raw/main/\2)", readme)
    return re.sub(r"\]\((?!https?://|#)([^)]+)\)", rf"]({home}/blob/main/\1)", readme)


def repository():
    """Return the address in ``[project.urls]``, None where the project has none."""
    found = re.search(r'^Repository = "(.+?)/?"', (HERE / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


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


if __name__ == "__main__":
    setup(
        cmdclass={"bdist_wheel": Wheel, "build_ext": BuildLibrary},
        long_description=description((HERE / "README.md").read_text(encoding="utf-8"), repository()),
        long_description_content_type="text/markdown",
    )
