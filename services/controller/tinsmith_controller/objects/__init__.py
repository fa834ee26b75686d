"""Kubernetes objects as the controller caches them: conversion into values, stores, and events.

The seam between `kube`, which knows JSON, and `plan`, which knows values.
"""
