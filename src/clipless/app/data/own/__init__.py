"""Tables and functions of the user's own, as data sets.

Nothing about a transformation is learned from the records: ranges, categories and classes are stated, or the table is
refused. An error about a cell names its column and line, never its contents or how many there are.
"""

from clipless.app.data.own.choice import OwnData
from clipless.app.data.own.functions import is_function, load_function
from clipless.app.data.own.loading import load_table
from clipless.app.data.own.new_records import load_features
from clipless.app.data.own.reading import TABLE_ENDS

__all__ = ["TABLE_ENDS", "OwnData", "is_function", "load_features", "load_function", "load_table"]
