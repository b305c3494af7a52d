"""A heat map of ratios: one row a workload, one column an operation, the number in every field."""

from pathlib import Path


def plot_grid(grid: dict, path: Path, title: str):
    """Draws the "grid" data of a result into a PNG.

    Parameters
    ----------
    grid
        `rows`, `columns` (names), `values` (a list a row; None where nothing was measured) and `label` (what they are):
        1 is even, above is in our favour.
    path, title
        Of the picture.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import TwoSlopeNorm

    rows, columns = grid["rows"], grid["columns"]
    values = [[float("nan") if value is None else value for value in line] for line in grid["values"]]
    chart, axes = pyplot.subplots(figsize=(2.8 + 0.9 * len(columns), 1.2 + 0.24 * len(rows)))
    # Beyond a quarter either way the colour says nothing more; the number does.
    image = axes.imshow(values, cmap="RdYlGn", norm=TwoSlopeNorm(1.0, 0.75, 1.25), aspect="auto")
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            measured = value == value
            colour = "white" if abs(value - 1.0) > 0.19 else "black"  # the ends of the colour map are dark
            text = f"{value:.2f}" if measured else "none"
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color=colour if measured else "gray")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.xaxis.tick_top()
    axes.set_title(title, fontsize=10)
    chart.colorbar(image, ax=axes, label=grid["label"], extend="both", pad=0.02, fraction=0.03)
    chart.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    chart.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(chart)
