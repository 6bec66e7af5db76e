"""Instruction following: checks of instructions that code can verify, by the ids of IFEval and IF multi-constraints."""
