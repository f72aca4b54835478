"""The stable order of small whole numbers, such as bucket codes."""

from megasparse.ops.counting_sort.operator import counting_sort

__all__ = ["counting_sort"]
