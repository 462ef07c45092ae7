"""CUDA sources of CKI, installed as `cki.cuda_src`: package data, no Python code."""
