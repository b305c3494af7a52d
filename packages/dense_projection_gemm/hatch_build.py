"""Gives the wheel a platform when CUDA modules are inside: they are libraries of this system, whatever the Python."""

import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PrebuiltModulesHook(BuildHookInterface):
    """Leaves a wheel of sources alone: it is for every platform."""

    def initialize(self, version, build_data):
        """Set the wheel's tag from the presence of `src/<package>/prebuilt`."""
        if any(Path(self.root).glob("src/*/prebuilt/*/module.so")):
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"
