"""Where the events of a run go: the console, `run.log`, TensorBoard, Weights & Biases. One file each."""

from lemma.reporting.sinks import make_sink

__all__ = ["make_sink"]
