"""Models in the formats of other engines (CTranslate2, ONNX, Marian), checked against the model, and run from there.

Models of other toolkits are read in `importing`.
"""
