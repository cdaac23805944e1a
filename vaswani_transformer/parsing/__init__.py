"""Constituency parsing (Section 6.3): trees, their linearization, the grammar of outputs, the parser, bracket scores."""
