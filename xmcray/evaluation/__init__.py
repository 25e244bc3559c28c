"""Answers become numbers: metrics, intervals, comparisons and reports."""
