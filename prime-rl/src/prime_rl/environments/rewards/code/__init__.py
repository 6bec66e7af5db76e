"""Rewards of code: MBPP, HumanEval, APPS. Programs run in the sandbox."""
