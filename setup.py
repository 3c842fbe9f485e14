"""What pyproject.toml cannot say: the package that is built holds the pages."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithPages(build_py):
    """Copies what `uqlab new` copies into uqlab/runs/project."""

    def run(self):
        super().run()
        project = Path(self.build_lib, "uqlab", "runs", "project")
        shutil.rmtree(project, ignore_errors=True)  # of an earlier build
        left_out = shutil.ignore_patterns("*.sweep", ".*", "__pycache__")
        for folder in ("notebooks", "figures/real"):
            shutil.copytree(folder, project / folder, ignore=left_out)
        (project / "data").mkdir()
        shutil.copy("data/README.md", project / "data")

    def get_outputs(self, include_bytecode=1):
        project = Path(self.build_lib, "uqlab", "runs", "project")
        pages = [str(path) for path in project.rglob("*") if path.is_file()]
        return super().get_outputs(include_bytecode) + pages


setup(cmdclass={"build_py": WithPages})
