"""N texts out of one mixed forward pass and one KV cache."""

from superpose.decoding.generate import Generation, generate
from superpose.decoding.joint_contrastive import JointContrastive
from superpose.decoding.raw import Decoder, Raw
from superpose.decoding.two_head import TwoHead

__all__ = ["Decoder", "Generation", "JointContrastive", "Raw", "TwoHead", "generate"]
