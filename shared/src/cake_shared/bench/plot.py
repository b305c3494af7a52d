"""A bar chart of peers' times over ours, one group of bars a case."""

from pathlib import Path


def plot_ratios(figures: dict[str, dict], path: Path, title: str):
    """Draws `figures` (the "times" data of a result) into a PNG: 1 is ours, higher is slower than ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from cake_shared.bench.timing import SAME_ARM

    cases = list(figures)
    peers = list(dict.fromkeys(n for f in figures.values() for n in list(f["ratio_to_ours"])[1:] if n != SAME_ARM))
    chart, axes = pyplot.subplots(figsize=(8, 0.6 + 0.5 * len(cases) * max(1, len(peers))))
    height = 0.8 / max(1, len(peers))
    for position, peer in enumerate(peers):
        ratios = [figures[case]["ratio_to_ours"].get(peer, 0.0) for case in cases]
        axes.barh([i + position * height for i in range(len(cases))], ratios, height=height * 0.9, label=peer)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks([i + height * (len(peers) - 1) / 2 for i in range(len(cases))], cases)
    axes.invert_yaxis()
    axes.set_xlabel("time over ours (1 is ours)")
    axes.set_title(title)
    axes.legend(loc="lower right")
    chart.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(chart)
