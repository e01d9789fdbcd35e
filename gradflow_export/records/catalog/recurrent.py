"""What the state of recurrent layers remembers."""

from __future__ import annotations

from gradflow_export.records.catalog.metric import MetricSpec


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    two_stages = "Cochran 1977, section 10.3"
    # fmt: off
    return (
        s("recurrent.spectral_radius", "spectral radius of the state", "1", "module",
          "median over at most 32 states, evenly spaced, of max |eigenvalue| of dz_t/dz_{t-1}; z = h, and c of an "
          "LSTM; above 128 dimensions by Arnoldi to a residual of 1e-3. Like every metric of recurrence of the first "
          "four sequences and 64 steps",
          "Pascanu et al. 2013, arXiv:1211.5063", "on the worker", low=0.0, marks=(0.75, 1.05),
          error="recurrent.spectral_radius_error"),
        s("recurrent.spectral_norm", "spectral norm of the state", "1", "module",
          "median over sampled states of the greatest singular value of dz_t/dz_{t-1}; far above the radius, the state "
          "grows before it decays", "Pascanu et al. 2013, arXiv:1211.5063", "on the worker", low=0.0,
          error="recurrent.spectral_norm_error"),
        s("recurrent.lyapunov", "largest Lyapunov exponent", "1", "module",
          "mean over sampled sequences of (1/T) ln ||J_T ... J_1 v||, in nats per step",
          "Benettin et al. 1980; Engelken et al. 2023, arXiv:2006.02427", "on the worker", marks=(0.0,),
          error="recurrent.lyapunov_error"),
        s("recurrent.decay", "gradient remaining after one step back in time", "1", "module", "exp(lambda_1)",
          "Engelken et al. 2023, arXiv:2006.02427", "c", low=0.0, marks=(0.75, 1.05),
          error="recurrent.decay_error"),
        s("recurrent.memory_length", "steps until a tenth of the gradient is left", "count", "module",
          "ln 0.1 / lambda_1; infinite when it does not decay", "definition", "c", low=0.0, scale="log", marks=(10.0,),
          error="recurrent.memory_length_error"),
        s("recurrent.lyapunov_error", "standard error of the Lyapunov exponent", "1", "module",
          "(((1 - f) b + f (1 - g) w) / n)^(1/2): b the variance of the exponents of n sequences, a share f of the "
          "batch, w the mean variance of their steps / steps, and b at least w, g the share of the steps that were "
          "run; 0 where all were", two_stages, "on the worker", low=0.0),
        s("recurrent.decay_error", "standard error of the gradient remaining", "share", "module",
          "recurrent.lyapunov_error", "propagation of errors", "c", low=0.0),
        s("recurrent.memory_length_error", "standard error of the steps until a tenth is left", "share", "module",
          "recurrent.lyapunov_error / |lambda_1|", "propagation of errors", "c", low=0.0),
        s("recurrent.effective_rank", "effective rank of the state's Jacobian", "1", "module",
          "median over sampled states of exp(H(sigma / sum sigma)) of dz_t/dz_{t-1}; missing above 512 dimensions",
          "Roy and Vetterli 2007, EUSIPCO", "on the worker", low=0.0, error="recurrent.effective_rank_error"),
        s("recurrent.rank_share", "effective rank / width of the state", "share", "module",
          "effective rank of dz_t/dz_{t-1} / dimensions of z", "definition", "c", low=0.0, high=1.0, marks=(0.1,),
          error="recurrent.effective_rank_error"),
        *(
            s(f"recurrent.{name}_error", f"standard error of the {title}", "share", "module",
              "(pi / 2)^(1/2) standard deviation over the states that were taken / (n^(1/2) median), and that of the "
              "medians of sequences / (m^(1/2) median) where a batch has more than these m, each with the correction "
              "for a finite population; 0 where all were taken",
              f"Kendall and Stuart 1977, section 10.10; {two_stages}", "c", low=0.0)
            for name, title in (
                ("spectral_radius", "spectral radius"),
                ("spectral_norm", "spectral norm"),
                ("effective_rank", "effective rank"),
            )
        ),
        s("recurrent.length", "steps of a sequence", "count", "module", "steps of the longest sequence of the step",
          "definition", "c", low=0.0, scale="log"),
    )
    # fmt: on
