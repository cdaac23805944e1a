"""The figures that the paper prints (arXiv 1706.03762v7), for tables beside our own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TranslationRow:
    """A row of Table 2: BLEU on newstest2014, training cost in FLOPs; None where the table is empty."""

    model: str
    bleu_de: float | None = None
    bleu_fr: float | None = None
    flops_de: float | None = None
    flops_fr: float | None = None


# The cost of the last two rows stands between both languages' columns.
TABLE2 = (
    TranslationRow("ByteNet", 23.75),
    TranslationRow("Deep-Att + PosUnk", None, 39.2, None, 1.0e20),
    TranslationRow("GNMT + RL", 24.6, 39.92, 2.3e19, 1.4e20),
    TranslationRow("ConvS2S", 25.16, 40.46, 9.6e18, 1.5e20),
    TranslationRow("MoE", 26.03, 40.56, 2.0e19, 1.2e20),
    TranslationRow("Deep-Att + PosUnk Ensemble", None, 40.4, None, 8.0e20),
    TranslationRow("GNMT + RL Ensemble", 26.30, 41.16, 1.8e20, 1.1e21),
    TranslationRow("ConvS2S Ensemble", 26.36, 41.29, 7.7e19, 1.2e21),
    TranslationRow("Transformer (base model)", 27.3, 38.1, 3.3e18, 3.3e18),
    TranslationRow("Transformer (big)", 28.4, 41.8, 2.3e19, 2.3e19),
)


@dataclass(frozen=True)
class VariationRow:
    """A row of Table 3, on newstest2013: perplexity a word piece, BLEU, millions of parameters where it prints them."""

    group: str
    preset: str
    label: str
    perplexity: float
    bleu: float
    millions: int | None = None


TABLE3 = (
    VariationRow("base", "base", "base", 4.92, 25.8, 65),
    VariationRow("A", "table3-a-heads-1", "h 1, d_k = d_v 512", 5.29, 24.9),
    VariationRow("A", "table3-a-heads-4", "h 4, d_k = d_v 128", 5.00, 25.5),
    VariationRow("A", "table3-a-heads-16", "h 16, d_k = d_v 32", 4.91, 25.8),
    VariationRow("A", "table3-a-heads-32", "h 32, d_k = d_v 16", 5.01, 25.4),
    VariationRow("B", "table3-b-dk-16", "d_k 16", 5.16, 25.1, 58),
    VariationRow("B", "table3-b-dk-32", "d_k 32", 5.01, 25.4, 60),
    VariationRow("C", "table3-c-layers-2", "N 2", 6.11, 23.7, 36),
    VariationRow("C", "table3-c-layers-4", "N 4", 5.19, 25.3, 50),
    VariationRow("C", "table3-c-layers-8", "N 8", 4.88, 25.5, 80),
    VariationRow("C", "table3-c-dmodel-256", "d_model 256, d_k = d_v 32", 5.75, 24.5, 28),
    VariationRow("C", "table3-c-dmodel-1024", "d_model 1024, d_k = d_v 128", 4.66, 26.0, 168),
    VariationRow("C", "table3-c-dff-1024", "d_ff 1024", 5.12, 25.4, 53),
    VariationRow("C", "table3-c-dff-4096", "d_ff 4096", 4.75, 26.2, 90),
    VariationRow("D", "table3-d-dropout-0.0", "P_drop 0.0", 5.77, 24.6),
    VariationRow("D", "table3-d-dropout-0.2", "P_drop 0.2", 4.95, 25.5),
    VariationRow("D", "table3-d-smoothing-0.0", "label smoothing 0.0", 4.67, 25.3),
    VariationRow("D", "table3-d-smoothing-0.2", "label smoothing 0.2", 5.47, 25.7),
    VariationRow("E", "table3-e-learned-positions", "learned positions", 4.92, 25.7),
    VariationRow("big", "big", "big", 4.33, 26.4, 213),
)


@dataclass(frozen=True)
class ParsingRow:
    """A row of Table 4: F1 on section 23 of the Wall Street Journal."""

    parser: str
    training: str
    f1: float


TABLE4 = (
    ParsingRow("Vinyals & Kaiser et al. (2014)", "WSJ only, discriminative", 88.3),
    ParsingRow("Petrov et al. (2006)", "WSJ only, discriminative", 90.4),
    ParsingRow("Zhu et al. (2013)", "WSJ only, discriminative", 90.4),
    ParsingRow("Dyer et al. (2016)", "WSJ only, discriminative", 91.7),
    ParsingRow("Transformer (4 layers)", "WSJ only, discriminative", 91.3),
    ParsingRow("Zhu et al. (2013)", "semi-supervised", 91.3),
    ParsingRow("Huang & Harper (2009)", "semi-supervised", 91.3),
    ParsingRow("McClosky et al. (2006)", "semi-supervised", 92.1),
    ParsingRow("Vinyals & Kaiser et al. (2014)", "semi-supervised", 92.1),
    ParsingRow("Transformer (4 layers)", "semi-supervised", 92.7),
    ParsingRow("Luong et al. (2015)", "multi-task", 93.0),
    ParsingRow("Dyer et al. (2016)", "generative", 93.3),
)
