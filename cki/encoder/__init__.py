"""Encoders of the BERT family on the user's own weights: `cki.Encoder`.

`encoder` is the class, `config` its numbers, `names` and `weights` read a state dict, `prepare` joins weights and puts
norms into them, `forward` is the way of a call, `graphs` captures calls by shape.  The operation that a call runs is
`cki.ops.encoder_model`.  See docs/encoder.md.
"""

from cki.encoder.config import EncoderConfig
from cki.encoder.encoder import Encoder
from cki.encoder.graphs import EncoderGraphs
from cki.encoder.weights import EncoderWeights

__all__ = ["Encoder", "EncoderConfig", "EncoderGraphs", "EncoderWeights"]
