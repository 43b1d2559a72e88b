"""Sources of records by kind of data: folders, tables, tar shards, Parquet files, TFDS, arrays."""
