"""Models of what was read from other toolkits' files."""

import torch

from vaswani_transformer import VaswaniForConditionalGeneration
from vaswani_transformer.importing.source import Imported


def model_of(imported: Imported, dtype: torch.dtype = torch.float32) -> VaswaniForConditionalGeneration:
    """The imported model, its weights complete and no more than that."""
    model = VaswaniForConditionalGeneration(imported.config).eval()
    keys = model.load_state_dict(imported.weights, strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) <= {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    model.tie_weights()
    return model.to(dtype)
