"""Doing: what runs a plan. The pure step machine decides; the executor, its lanes and its effects obey."""
