"""Every field of the routes' answers is documented."""

from pathlib import Path

from support.models import document
from support.server import tiered, user

PAGE = (Path(__file__).parents[2] / "docs" / "statistics.md").read_text()


def test_every_field_is_documented(tiny_llama, cache_dir, tmp_path):
    flags = ["--generation-checkpoint", "16", "--kv-scheme", "affine:8:32"]
    with tiered(tiny_llama, cache_dir, *flags, log=tmp_path / "log") as server:
        server.chat(user(document(500)), max_tokens=2)
        status, report = server.flush()
        stats = server.stats()
    assert status == 200
    fields = [*report, *stats, *(f"ram.{name}" for name in stats["ram"]), *(f"{part}.{name}" for part in ("ssd", "checkpoints", "kv") for name in stats[part])]
    missing = [name for name in fields if name not in ("ram",) and f"`{name}`" not in PAGE]
    assert not missing
    assert stats["faults"] == {} and isinstance(stats["uptime_s"], float)
