"""Updates in coarse number formats, and phase and magnitude."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    rounding = "Zamirai et al. 2020, arXiv:2010.06192"
    # fmt: off
    return (
        s("parameter.lost_share", "updates lost by rounding", "share", "parameter",
          "#{e != 0, d == 0} / #{e != 0}; d the change of the weights from one forward pass to the next, on their "
          "declared grid or in their number format, e the update the same optimizer means without rounding", rounding,
          "2P sampled", low=0.0, high=1.0, marks=(0.95,), error="parameter.lost_share_error"),
        s("parameter.intended_share", "entries with an intended change", "share", "parameter", "#{e != 0} / numel",
          "definition", "2P sampled", low=0.0, high=1.0),
        s("parameter.changed_share", "entries that changed", "share", "parameter", "#{d != 0} / numel, bit by bit",
          "definition", "2P sampled", low=0.0, high=1.0),
        s("parameter.read_share", "entries read", "share", "parameter",
          "entries of whole rows / numel; other metrics of discrete updates of a tensor are over the same entries",
          "definition", "c", low=0.0, high=1.0),
        s("parameter.grid", "width of the declared grid", "weight", "parameter", "as given to watch(grids=...)",
          "definition", "c", low=0.0, scale="log"),
        s("parameter.between", "kept between grid points", "1", "parameter",
          "1 where the weights lie off their declared grid by more than rounding and 0.001 steps (root mean square), "
          "so that updates add up before they show, else 0", "definition", "2P sampled", low=0.0, high=1.0),
        s("parameter.change_norm", "change from one forward pass to the next", "weight/step", "parameter",
          "||d||, times (numel / entries looked at)^(1/2)", "definition", "2P sampled", low=0.0, scale="log"),
        s("parameter.update_error", "update error", "1", "parameter",
          "||d - e||^2 / ||e||^2: quantisation noise over signal", "Bennett 1948", "2P sampled", low=0.0, scale="log"),
        s("parameter.update_cosine", "cosine of actual and intended update", "1", "parameter", "<d, e> / (||d|| ||e||)",
          "definition", "2P sampled", low=-1.0, high=1.0),
        s("parameter.update_effectiveness", "update effectiveness", "share", "parameter",
          "max(0, cosine) min(r, 1 / r), r = ||d|| / ||e||; 1 exact, 0 lost", "definition", "c", low=0.0, high=1.0,
          error="parameter.update_effectiveness_error"),
        *(
            s(f"parameter.{name}_error", f"standard error of the {title}", "1", "parameter",
              "of a ratio of sums over the rows that are looked at, corrected for a finite population; missing "
              "where all are", "Cochran 1977, Sampling Techniques, section 6.3", "2P sampled", low=0.0)
            for name, title in (("lost_share", "lost share"), ("update_effectiveness", "effectiveness"))
        ),
        s("parameter.master", "kept in float32 by the optimizer", "1", "parameter",
          "1 where the optimizer's state holds float32 weights of the parameter, else 0", "definition", "c", low=0.0,
          high=1.0),
        s("parameter.rate_effectiveness", "update over learning rate times gradient", "1", "parameter",
          "||w_after - w_before|| / (lr ||g||); 1 for SGD, 1 / (1 - momentum) with momentum at rest", "definition",
          "c", low=0.0, scale="log", marks=(1.0,)),
        s("update.lost_share", "updates lost by rounding, all parameters", "share", "run",
          "parameter.lost_share, weighted by entries meant to change; of parameters read at this step, of those on "
          "declared grids where there are any; without parameters kept in float32 or between the points of their grid",
          rounding, "c", low=0.0, high=1.0,
          marks=(0.95,), error="update.lost_share_error"),
        s("update.effectiveness", "update effectiveness, all parameters", "share", "run",
          "mean of parameter.update_effectiveness, weighted by numel; of parameters on declared grids where there are "
          "any; without parameters kept in float32", "definition", "c", low=0.0, high=1.0,
          error="update.effectiveness_error"),
        *(
            s(f"update.{name}_error", f"standard error of the {title}, all parameters", "1", "run",
              "(sum_p (w_p e_p)^2)^(1/2) / sum_p w_p, e the errors and w the weights of the parameters", "propagation "
              "of errors", "c", low=0.0)
            for name, title in (("lost_share", "lost share"), ("effectiveness", "effectiveness"))
        ),
        s("update.change_norm", "change from one forward pass to the next, all parameters", "weight/step", "run",
          "(sum of parameter.change_norm squared)^(1/2); of parameters on declared grids where there are any",
          "definition", "c", low=0.0, scale="log"),
        s("node.phase_gradient", "gradient of the phase", "gradient", "node",
          "mean over nodes of ||g_phi||, g_phi = |w| Im(conj(w / |w|) g); across the row where a row is a node",
          "chain rule through torch.polar", "1P sampled", low=0.0, scale="log"),
        s("node.magnitude_gradient", "gradient of the magnitude", "gradient", "node",
          "mean over nodes of ||g_r||, g_r = Re(conj(w / |w|) g); along the row where a row is a node",
          "Salimans and Kingma 2016, arXiv:1602.07868", "1P sampled", low=0.0, scale="log"),
        s("node.phase_change", "change of the phase", "1", "node",
          "mean over nodes of the angle by which they turned, radian: of a row of phases the root mean square of its "
          "entries' changes, wrapped to (-pi, pi]; of a real row the angle between before and after", "definition",
          "1P sampled", low=0.0, scale="log"),
        s("node.magnitude_change", "change of the magnitude", "weight/step", "node",
          "mean over nodes of the change of the magnitude", "definition", "1P sampled", low=0.0, scale="log"),
        s("node.changed_share", "nodes that changed", "share", "node", "nodes that another forward pass sees as "
          "others / nodes", "definition", "1P sampled", low=0.0, high=1.0),
        s("node.quiet_share", "nodes with an unusually small gradient", "share", "node",
          "nodes whose ln ||g|| lies below the layer's median by more than 6 x 1.4826 MAD and ln 20 / nodes",
          "Iglewicz and Hoaglin 1993", "1P sampled", low=0.0, high=1.0),
        s("node.count", "nodes", "count", "node", "rows of the tensor", "definition", "c", low=0.0, scale="log"),
        s("node.update_frequency", "how often a node changed", "share", "node",
          "updates that changed the node / the last 50 measured; of all nodes where there are at most 256, else of the "
          "four of each tensor that changed least often", "definition", "2P sampled", low=0.0, high=1.0),
        s("node.effectiveness", "update effectiveness of a node", "share", "node",
          "parameter.update_effectiveness of one row, for the same nodes", "definition", "2P sampled", low=0.0,
          high=1.0),
        s("node.small", "unusually small gradient of a node", "1", "node",
          "||g|| / the median of its tensor, for at most eight nodes that node.quiet_share counts",
          "Iglewicz and Hoaglin 1993", "1P sampled", low=0.0, scale="log"),
        s("phase.gradient", "gradient of the phase, all nodes", "gradient", "run", "mean over nodes", "definition", "c",
          low=0.0, scale="log"),
        s("phase.change", "change of the phase, all nodes", "1", "run", "mean over nodes; radian", "definition", "c",
          low=0.0, scale="log"),
        s("phase.correlation", "phase and magnitude gradient, correlation", "1", "run",
          "Pearson's r of ln ||g_phi|| and ln ||g_r|| over at most 4096 nodes where both are above 0; missing below 8",
          "Pearson 1895", "c",
          low=-1.0, high=1.0),
        s("phase.rank_correlation", "phase and magnitude gradient, rank correlation", "1", "run",
          "Spearman's rho of ||g_phi|| and ||g_r|| over the same nodes", "Spearman 1904", "c", low=-1.0, high=1.0),
        s("magnitude.gradient", "gradient of the magnitude, all nodes", "gradient", "run", "mean over nodes",
          "definition", "c", low=0.0, scale="log"),
        s("magnitude.change", "change of the magnitude, all nodes", "weight/step", "run", "mean over nodes",
          "definition", "c", low=0.0, scale="log"),
        s("update.changed_nodes", "nodes that changed, all tensors", "count", "run",
          "sum of node.changed_share node.count", "definition", "c", low=0.0),
    )
    # fmt: on
