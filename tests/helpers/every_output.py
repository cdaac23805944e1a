"""Small models whose every output can be listed, for the tests of search."""

import torch
from conftest import tiny_model
from references import outputs_within

from vaswani_transformer import VaswaniForConditionalGeneration

START, PAD, END = 0, 1, 2
VOCABULARY, LIMIT = 6, 4
EVERY_PREFIX = 150  # hypotheses at the last step but one: 5^2 prefixes times 6 tokens, so that none is ever pruned


def without_padding(row: torch.Tensor) -> list[int]:
    """A returned output up to its end token; what follows must be padding."""
    tokens = row.tolist()
    if END in tokens:
        end = tokens.index(END) + 1
        assert set(tokens[end:]) <= {PAD}
        tokens = tokens[:end]
    return tokens


def peaked_model(seed: int) -> VaswaniForConditionalGeneration:
    """A model over six tokens whose distributions are far from flat and change from step to step."""
    model = tiny_model(seed=seed, vocab_size=VOCABULARY, scale=1.5, position_encoding="learned")
    with torch.no_grad():
        model.model.decoder.embed_positions.weight.mul_(6)
    return model


@torch.no_grad()
def every_output(
    model, input_ids: torch.Tensor, alpha: float, limit: int = LIMIT, rule: str = "gnmt"
) -> list[tuple[float, tuple[int, ...]]]:
    """All outputs of at most `limit` tokens for one source with their scores, the best first.

    The score is logP / ((5 + |Y|) / 6)^alpha, or logP / |Y|^alpha for the rule "power". transformers counts an output
    that is cut at the limit as finished, so they take part.
    """
    prefixes = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * (limit - 1)).reshape(-1, limit - 1)
    inputs = torch.cat((torch.full((len(prefixes), 1), START), prefixes), dim=1)
    logits = model(input_ids.expand(len(inputs), -1), decoder_input_ids=inputs, use_cache=False).logits
    log_probs = dict(zip(map(tuple, prefixes.tolist()), logits.double().log_softmax(dim=-1).tolist(), strict=True))

    def score(output):
        row = log_probs[(*output[: limit - 1], *[0] * (limit - 1 - len(output)))]  # later inputs change nothing
        total = sum(row[step][token] for step, token in enumerate(output))
        length = len(output)
        return total / (length if rule == "power" else (5 + length) / 6) ** alpha

    return sorted(((score(output), output) for output in outputs_within(VOCABULARY, END, limit)), reverse=True)


def chained_model(table: list[list[float]]) -> VaswaniForConditionalGeneration:
    """After each token, whatever came before it and whatever the source is, the probabilities of its row."""
    model = tiny_model(vocab_size=len(table), tie_word_embeddings=False)
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            for module in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
                for parameter in module.parameters():
                    parameter.zero_()
            for norm in (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm):
                norm.weight.fill_(1)
                norm.bias.zero_()
        width = model.config.d_model
        seen = torch.nn.functional.layer_norm(torch.eye(width), [width])[: len(table)]  # what the last layer has
        model.model.decoder.embed_tokens.weight.copy_(1e4 * torch.eye(len(table), width))
        model.lm_head.weight.copy_((torch.linalg.pinv(seen) @ torch.tensor(table).log()).T)
    return model
