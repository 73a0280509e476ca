"""Writes docs/settings.md from the settings model: `python -m service.settings_page`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.config import Settings

FILE = Path(__file__).parent.parent / "docs" / "settings.md"
HEAD = """\
# Settings

All that may stand under `args:` of an application in a deployment such as
[deployments/spd.yaml](../deployments/spd.yaml). This page is written by
`python -m service.settings_page` from [service/config.py](../service/config.py), and a test holds
it to that. Unknown settings and values that can't work are refused before anything starts, by name.
An unset setting may be left out or be `null`.
"""
Schema = dict[str, Any]


def page() -> str:
    """The whole page, as Markdown."""
    root = Settings.model_json_schema()
    names = {field: s["$ref"] for field, s in root["properties"].items() if "$ref" in s}
    names["emulated"] = root["properties"]["emulated"]["anyOf"][0]["$ref"]
    parts = [HEAD, *_section("", root, skip=names.keys())]
    for name, reference in names.items():
        parts += _section(name, root["$defs"][reference.rsplit("/", 1)[1]])
    return "\n".join(parts)


def _section(name: str, model: Schema, skip: Any = ()) -> Iterator[str]:
    about = " ".join(model["description"].split())
    yield f"## {f'`{name}`' if name else 'At the top'}\n\n{about}\n"
    yield "| setting | type | default | |\n|---|---|---|---|"
    required = model.get("required", ())
    for field, schema in model["properties"].items():
        if field not in skip:
            default = "must be given" if field in required else _default(schema.get("default"))
            place = f"{name}.{field}" if name else field
            about = schema["description"].replace("|", "\\|")
            yield f"| `{place}` | {_type(schema)} | {default} | {about} |"
    yield ""


def _default(value: Any) -> str:
    """As YAML has it."""
    if value is None:
        return "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(schema: Schema) -> str:
    """What a value may be, in words."""
    if "anyOf" in schema:
        unset = schema["default"] is None  # says already that it may be null
        return " or ".join(_type(s) for s in schema["anyOf"] if not unset or s != {"type": "null"})
    if values := schema.get("enum", [schema["const"]] if "const" in schema else None):
        return ", ".join(f"`{value}`" for value in values)
    kind: str = schema["type"]
    if kind == "array":
        return f"list: {_type(schema['items'])}"
    words = {"integer": "whole number", "boolean": "`true`, `false`", "null": "`null`"}
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    bounds = [f"{said} {schema[key]:g}" for key, said in limits.items() if key in schema]
    bounds += ["not empty"] if schema.get("minLength") else []
    return words.get(kind, kind) + (f" ({', '.join(bounds)})" if bounds else "")


if __name__ == "__main__":
    FILE.write_text(page())
