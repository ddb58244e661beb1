"""``mlx_lm.tiered doctor``: what is installed, what is hooked, what would not work.

`examine` collects, `describe` prints. A problem is something requested that cannot
work (exit code 1); a warning is something that works, but not as well as it could.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlx_lm_hooks import PluginError, find_host, installed_plugins

from . import openblas, versions
from .settings import env_name, flag, format_size

OURS = "tiered"
SERVE_HINT = "`mlx_lm.tiered serve` works without it"


@dataclass
class Report:
    """Everything found. `problems` and `warnings` hold one sentence each."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {**self.facts, "problems": self.problems, "warnings": self.warnings, "ok": not self.problems}


def examine(ssd_cache: Path | None, environ: Mapping[str, str] = os.environ) -> Report:
    """Look at everything. `ssd_cache`: the SSD tier's directory, None when there is none to look at. Never raises for what it finds."""
    report = Report()
    report.facts["versions"] = versions.versions()
    report.facts["machine"] = versions.machine()
    _plugins(report, environ)
    _host(report)
    _device(report)
    if ssd_cache is not None:
        report.facts["cache"] = _cache(report, ssd_cache)
    return report


def _plugins(report: Report, environ: Mapping[str, str]) -> None:
    plugins = installed_plugins()
    report.facts["plugins"] = [
        {"name": name, "module": ep.value, "package": ep.dist.name if ep.dist else None, "version": ep.dist.version if ep.dist else None}
        for name, ep in sorted(plugins.items())
    ]
    if OURS not in plugins:
        report.problems.append("the plugin `tiered` is not among the installed plugins; reinstall mlx-lm-tiered")
    from mlx_lm_hooks.manager import PLUGINS_ENV, split_names

    for name in split_names([environ.get(PLUGINS_ENV, "")]):
        if name not in plugins:
            report.problems.append(f"{PLUGINS_ENV} asks for the plugin {name!r}, which is not installed")


def _host(report: Report) -> None:
    report.facts["start_up"] = report.facts["seams"] = None
    try:
        host = find_host()
    except (PluginError, ImportError) as error:
        report.problems.append(f"mlx-lm cannot be hooked: {error}")
        return
    start_up = dict(host.start_up())
    report.facts["start_up"] = start_up
    if start_up["state"] != "ok":
        report.problems.append(f"--plugin cannot work: {start_up.get('detail') or start_up['state']}; {SERVE_HINT}")
    seams = host.seams()
    report.facts["seams"] = [
        {"name": s.name, "state": s.state, "feature": s.feature, "detail": s.detail, **dict(s.extra)} for s in seams
    ]
    for seam in seams:
        text = f"seam {seam.name} ({seam.feature}): {seam.detail or seam.state}"
        if seam.state == "unknown-body":
            report.warnings.append(text)
        elif seam.state != "ok":
            report.problems.append(text)


def _device(report: Report) -> None:
    try:
        report.facts["device"] = versions.device()
        on_cpu = versions.on_cpu()
        report.facts["decode_kernels"] = _decode_kernels()
    except Exception as error:  # A broken mlx fails in its own ways; all mean the same here.
        report.facts["device"] = report.facts["decode_kernels"] = None
        report.problems.append(f"mlx does not load ({error}); on Linux install mlx-lm-tiered[cpu], [cuda12] or [cuda13]")
        return
    if on_cpu and sys.platform.startswith("linux") and not openblas.find():
        report.warnings.append(openblas.INSTALL_HINT)


def _decode_kernels() -> str:
    from .kernels.choice import available
    from .kernels.decode import dialect

    return dialect() if available() else "none"


def _cache(report: Report, root: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"path": str(root), "exists": root.exists()}
    ground = next(path for path in [root, *root.parents] if path.exists())
    facts["writable"] = ground.is_dir() and os.access(ground, os.W_OK | os.X_OK)
    if not ground.is_dir():
        report.problems.append(f"the SSD tier cannot be at {root}: {ground} is not a directory")
        return facts
    if not facts["writable"]:
        what = "cannot be written to" if ground == root else f"cannot be made: {ground} cannot be written to"
        report.problems.append(f"the SSD tier's directory {root} {what}")
    facts["free_bytes"] = shutil.disk_usage(ground).free
    if facts["exists"]:
        status = root.stat()
        facts["owner_only"] = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        if not facts["owner_only"]:
            report.warnings.append(f"others may look into {root}, which holds what was said to the model; chmod 700 {root}")
        _contents(report, root, facts)
    return facts


def _contents(report: Report, root: Path, facts: dict[str, Any]) -> None:
    from .cold.directory import Directory

    try:
        files = Directory(root, 0).files()
    except OSError as error:
        report.problems.append(f"the SSD tier's directory {root} cannot be read: {error.strerror}")
        return
    by_kind = {kind: [file for file in files if file.kind == kind] for kind in ("entry", "bad", "partial", "other")}
    facts["entries"] = len(by_kind["entry"])
    facts["bytes"] = sum(file.charge for file in files)
    facts["quarantined"] = len(by_kind["bad"])
    facts["being_written"] = len(by_kind["partial"])
    foreign = [file for file in by_kind["other"] if not _side_file(file.path.relative_to(root).as_posix())]
    facts["foreign"] = len(foreign)
    if by_kind["bad"]:
        report.warnings.append(f"{len(by_kind['bad'])} damaged entries were set aside in {root / 'quarantine'}")
    if foreign:
        report.warnings.append(f"{len(foreign)} files in {root} are not ours, such as {foreign[0].path.name}; they count towards the cap and are never deleted")


def _side_file(name: str) -> bool:
    """Whether a file that is no entry is ours all the same: the lock, and the memo of the weights' digests."""
    return name == "lock" or name.startswith("identities.json")


_KERNELS = {
    "cuda": "each is tested at its first use",
    "metal": "by Metal, which its tests only imitate: each is tested and timed at its first use",
    "none": "none for this device",
}


def describe(report: Report) -> str:
    """The report for people."""
    facts = report.facts
    lines = ["versions   " + ", ".join(f"{name} {version or 'NOT INSTALLED'}" for name, version in facts["versions"].items())]
    machine = facts["machine"]
    lines.append(f"machine    {machine['platform']}, {machine['cores']} cores, {format_size(machine['memory_bytes'])}")
    lines.append(f"device     {facts['device'] or 'mlx does not load'}")
    if facts["decode_kernels"] is not None:
        lines.append(f"kernels    decode attention over quantized KV: {_KERNELS[facts['decode_kernels']]}")
    if sys.platform.startswith("linux"):
        lines.append(f"OpenBLAS   {machine['openblas'] or 'not installed'}")
    lines += [f"plugin     {p['name']} ({p['package']} {p['version']})" for p in facts["plugins"]]
    if facts["start_up"]:
        lines.append(f"start-up   {facts['start_up']['state']}: {facts['start_up'].get('path') or facts['start_up'].get('detail', '')}")
    if facts["seams"]:
        names = max(len(seam["name"]) for seam in facts["seams"])
        features = max(len(seam["feature"]) for seam in facts["seams"])
        lines += [
            f"seam       {s['name'].ljust(names)}  {s['feature'].ljust(features)}  {s['state']}  {s['detail']}".rstrip() for s in facts["seams"]
        ]
    lines += _describe_cache(facts.get("cache"))
    lines += [f"warning    {text}" for text in report.warnings]
    lines += [f"PROBLEM    {text}" for text in report.problems]
    return "\n".join(lines + ([] if report.problems else ["all that was asked for can work"]))


def _describe_cache(cache: Mapping[str, Any] | None) -> list[str]:
    if cache is None:
        return [f"SSD tier   not asked for ({flag('ssd_cache')} DIR or {env_name('ssd_cache')})"]
    if "entries" not in cache:
        return [f"SSD tier   {cache['path']}" + ("" if cache["exists"] else ", not made yet")]
    return [
        f"SSD tier   {cache['path']}: {cache['entries']} entries, {format_size(cache['bytes'])}, {format_size(cache['free_bytes'])} free, "
        f"{cache['quarantined']} damaged, {cache['foreign']} not ours"
    ]
