"""The path of the weights and whether it goes round."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    # fmt: off
    return (
        s("flow.winding", "turns of the path", "1", "run",
          "turns about the mean of 64 points, 1, 4 or 16 steps apart, in the plane of the two greatest principal "
          "components; over 64 evenly spaced weights of each optimizer", "Mardia and Jupp 2000", "c", low=0.0,
          marks=(1.0,),
          error="flow.winding_error"),
        s("flow.plane", "path within one plane", "share", "run",
          "share of the path's variance in that plane", "principal components", "c", low=0.0, high=1.0, marks=(0.8,),
          error="flow.plane_error"),
        s("flow.growth", "growth of the path's radius", "1", "run",
          "rms distance from the mean in the second half of the points / in the first", "definition", "c", low=0.0,
          scale="log", marks=(1.0,),
          error="flow.growth_error"),
        s("flow.work", "work along the path", "1", "run",
          "sum g_{t+1} . d_t / sum |g_{t+1}| |d_t|, d_t the move from t to t + 1: -1 downhill to the end of each move, "
          "0 noise", "gradient theorem", "c", low=-1.0, high=1.0,
          error="flow.work_error"),
        s("flow.straightness", "straightness of the path", "1", "run", "|sum d_t| / sum |d_t|", "definition", "c",
          low=0.0, high=1.0,
          error="flow.straightness_error"),
        s("flow.turning", "turning angle", "1", "run", "mean angle between consecutive moves, in radians",
          "definition", "c", low=0.0, high=3.1415927,
          error="flow.turning_error"),
        s("flow.radius", "radius of the path", "weight", "parameter",
          "rms distance of the followed weights from their mean over the points; at the first parameter of each "
          "optimizer", "definition", "c", low=0.0, scale="log"),
        s("gradient.coherence", "agreement of gradients", "1", "run",
          "mean pairwise cosine of the gradients of the points of the longest window, (n R^2 - 1) / (n - 1), R their "
          "mean resultant length",
          "Mardia and Jupp 2000", "c", low=-1.0, high=1.0,
          error="gradient.coherence_error"),
        *(
            s(f"{name}_error", f"standard error of the {title}", "1", "run",
              "half the difference between what either half of the followed weights of each optimizer says; missing "
              "where all weights are followed", "method of random groups, Wolter 2007, section 2.2", "c", low=0.0)
            for name, title in (
                ("flow.winding", "turns"),
                ("flow.plane", "share in one plane"),
                ("flow.growth", "growth"),
                ("flow.work", "work"),
                ("flow.straightness", "straightness"),
                ("flow.turning", "turning angle"),
                ("gradient.coherence", "agreement of gradients"),
            )
        ),
    )
    # fmt: on
