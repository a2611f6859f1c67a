"""What can be proved: certificates of acceptance, bounds from few numbers, draft trees and their best shapes.

The mathematics stands in docs/research/theory.md. Not here: how a report shows it (`report.sections`).
"""
