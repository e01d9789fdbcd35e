"""The GradFlow panel of TensorBoard; reads what gradflow_export wrote and never imports torch."""
