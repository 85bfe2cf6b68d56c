"""What `train.py --list-tasks` prints."""

from dataclasses import asdict

from sidco_ddp.workloads import SCALES, TASKS


def list_tasks() -> str:
    """All tasks with the settings of their recipes at each scale, as text."""
    lines = []
    for name, kind in TASKS.items():
        lines.append(f"{name}: {' '.join((kind.__doc__ or '').split())} Metric: {kind.metric_name}.")
        for scale in SCALES:
            settings = "  ".join(f"{key}={_text(value)}" for key, value in asdict(kind.recipes[scale]).items())
            lines.append(f"  {scale}: {settings}")
    return "\n".join(lines)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return "none" if value is None else str(value)
