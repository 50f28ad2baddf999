"""Where the events of a run go: the console, `run.log`, TensorBoard, Weights & Biases. One file each."""

from lemma.reporting.sinks import make_sink, sink_of

__all__ = ["make_sink", "sink_of"]
