"""S3: names of places, a client with timeouts, trees of files down and up, a local cache."""

from prime_rl.configs.storage import BadS3Name, S3Name
from prime_rl.storage.s3 import S3, S3Object, aws_client
from prime_rl.storage.trees import Tree, download_tree, upload_tree

__all__ = [
    "S3",
    "BadS3Name",
    "S3Name",
    "S3Object",
    "Tree",
    "aws_client",
    "download_tree",
    "upload_tree",
]
