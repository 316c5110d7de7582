"""Every command of the README, the help texts and the packaged card composes to a valid config."""

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from superpose import config
from superpose.cli import several_suites
from superpose.pipelines import plain

ROOT = Path(__file__).parents[1]
SOURCES = (
    "README.md",
    "CHANGELOG.md",
    "conf/train.yaml",
    "conf/evaluate.yaml",
    "superpose/models/tiny_weights/README.md",
    "superpose/models/tiny_guide_weights/README.md",
    *(str(file.relative_to(ROOT)) for file in sorted((ROOT / "docs").glob("*.md"))),
    *(
        str(file.relative_to(ROOT))
        for file in sorted((ROOT / "conf" / "experiment").glob("*.yaml"))
    ),
)
COMMAND = re.compile(r"python (train|evaluate)\.py((?: [^\s`#]+)*)")  # words parted by one space


def commands() -> list[tuple[str, str]]:
    found = {}
    for source in SOURCES:
        for script, arguments in COMMAND.findall((ROOT / source).read_text(encoding="utf-8")):
            found[script, arguments.strip()] = None
    return list(found)


@pytest.mark.parametrize(("script", "arguments"), commands())
def test_command_composes(script, arguments):
    words = shlex.split(arguments)
    if any(word in ("--help", "[GROUP=NAME", "suite=NAME", "key=a,b") for word in words):
        return
    overrides = [word for word in words if word not in ("-m", "&&", "pytest")]
    overrides = several_suites(overrides)
    # a sweep's lists: the first value of each
    overrides = [
        key
        if not sign
        else f"{key}={value if value.startswith(('[', chr(39))) else value.split(',')[0]}"
        for key, sign, value in (word.partition("=") for word in overrides)
    ]
    filled = [word for word in overrides if "experiment=" not in word or "smollm2" not in word]
    if len(filled) < len(overrides) and not any("model.path" in word for word in overrides):
        overrides += ["model.path=x", "data.path=x"]
    config.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        assert plain(compose(script, overrides=[*overrides, "output_dir=/tmp/nowhere"]))


def test_there_are_commands():
    assert len(commands()) > 15
