"""The README says what is so: its tables are generated, its examples run, its commands are the ones that are used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mmpos import create_encoding, list_encodings
from mmpos.docs import encoding_table, main, rewrite
from mmpos.encodings import registry
from mmpos.testing import TinyTransformer, assert_close, assert_relative, randomise

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def example(title: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", section(title), flags=re.DOTALL)
    assert len(blocks) == 1
    return blocks[0]


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "readme_example"}
    exec(compile(code, "README.md", "exec"), names)
    return names


def test_tables_are_up_to_date() -> None:
    assert rewrite(README, ROOT) == README, "run `python -m mmpos.docs`"
    assert main([str(ROOT / "README.md"), "--check"]) == 0


def test_an_old_table_is_noticed_and_rewritten(tmp_path: Path) -> None:
    old = README.replace("| `none` |", "| `nothing` |")
    assert old != README
    path = tmp_path / "README.md"
    path.write_text(old, encoding="utf-8")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert main([str(path), "--check"]) == 1
    assert path.read_text(encoding="utf-8") == old
    assert main([str(path)]) == 0
    assert path.read_text(encoding="utf-8") == README
    with pytest.raises(ValueError, match="encodings"):
        rewrite("no markers", ROOT)
    assert main([str(tmp_path / "missing.md")]) == 2


def test_table_has_every_encoding_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", encoding_table(), flags=re.MULTILINE)
    assert rows == list_encodings()


def test_there_are_two_commands_and_ci_uses_the_second() -> None:
    commands = re.findall(r"```bash\n(.*?)```", section("Two commands"), flags=re.DOTALL)
    assert len(commands) == 2
    first, second = (command.strip() for command in commands)
    assert "\n" not in first + second
    assert first.endswith("python train.py recipe=vit_ropemixed")
    assert 'pip install -e ".[train]"' in first
    assert re.fullmatch(r'pip install -e "\.\[dev\]" && pytest.*', second)
    between = re.search(r"<!-- test command -->\n```bash\n(.*?)\n```\n<!-- /test command -->", README)
    assert between is not None
    assert between[1] == second
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert 'eval "$command"' in script
    assert "pip install" not in script  # what is installed stands in the README only


def test_recipes_of_the_table_exist() -> None:
    names = re.findall(r"^\| `(\w+)` \|", section("Recipes"), flags=re.MULTILINE)
    assert "vit_ropemixed" in names
    assert all((ROOT / "configs" / "recipe" / f"{name}.yaml").is_file() for name in names)


def test_local_links_lead_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_example_timm() -> None:
    pytest.importorskip("timm")
    assert len(example("In a timm ViT").strip().splitlines()) <= 10
    run(example("In a timm ViT"))


def test_example_attention() -> None:
    run(example("In your own attention"))


def test_example_open_clip() -> None:
    pytest.importorskip("open_clip")
    run(example("In open_clip"))


def test_example_of_a_new_encoding() -> None:
    """The example is registered by running it, and keeps the promises of an encoding."""
    assert "distance_decay" not in list_encodings()
    code = example("Adding an encoding")
    run(code)
    assert "distance_decay" in list_encodings()
    assert "`distance_decay`" in encoding_table()
    stack = randomise(create_encoding("distance_decay", 48, 2, depth=2, start=0.2))
    from mmpos import Positions

    model = TinyTransformer(stack)
    for num_prefix in (0, 1, 5):
        positions = Positions.grid(3, 5, num_prefix=num_prefix)
        x = model.tokens(positions)
        assert_close(model(x, positions), model(x, positions, plain=True), terms=4096)
        assert_relative(stack, positions, (2.25, -7.5))
        order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
        shuffled = torch.cat([x[:, :num_prefix], x[:, num_prefix:][:, order]], dim=1)
        expected = model(x, positions)
        expected = torch.cat([expected[:, :num_prefix], expected[:, num_prefix:][:, order]], dim=1)
        assert_close(model(shuffled, positions.take(order)), expected, terms=4096)
        assert (model(shuffled, positions) - expected).abs().max() > 1e-3
    model.bfloat16()
    assert stack.layers[0]["distance_decay"].slopes.dtype == torch.float32
    assert stack.no_weight_decay() == {f"layers.{i}.distance_decay.slopes" for i in (0, 1)}


def test_decoder_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", section("In a vision-language decoder"), flags=re.DOTALL)
    assert len(blocks) == 2
    assert "longer" in run(blocks[0])
    assert "vlm" in run(blocks[1])


def test_example_of_a_table() -> None:
    names = run(example("In a table"))
    assert 0 < float(names["loss"].detach()) < 0.7
    assert names["cache"].mask[1].sum() == 12 + 1


def test_example_of_several_views() -> None:
    names = run(example("Between several views"))
    assert names["out"].shape == (1, 4, 144, 48)
