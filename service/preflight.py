"""Checks a serve YAML before Ray starts, so that a mistake is one message and not a traceback from
a worker: `python -m service.preflight deployments/spd.yaml`. Fetches the target where it must."""

import os
import sys
from pathlib import Path

import yaml

from service.api.keys import load_keys
from service.config import ConfigError, parse_settings

IMPORT_PATH = "service.app:build"


def check(file: Path) -> None:
    """Raises ConfigError for settings, API keys, a target or a PDM that can't work."""
    try:
        config = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    if not isinstance(config, dict) or not config.get("applications"):
        raise ConfigError(f"{file} has no `applications`; see deployments/spd.yaml")
    from service.pipeline.blueprint import make_blueprint  # imports torch

    for application in config["applications"]:
        if application.get("import_path") == IMPORT_PATH:
            settings = parse_settings(application.get("args") or {})
            load_keys(settings.api.keys_file, os.environ)
            broken = make_blueprint(settings).broken_pdm
            if broken is not None:
                sys.stderr.write(
                    f"Warning: the PDM can't be used, it is served without: {broken}\n"
                )


def passes(file: Path) -> bool:
    """Whether `check` has nothing against it; says on stderr what it has."""
    try:
        check(file)
    except ConfigError as error:
        sys.stderr.write(f"{file} can't be served.\n{error}\n")
        return False
    return True


def main() -> int:
    return 0 if passes(Path(sys.argv[1])) else 1


if __name__ == "__main__":
    sys.exit(main())
