"""Manifests as people write them."""

from __future__ import annotations

SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.1
  ports:
  - name: http
    port: 80
    protocol: TCP
"""

SLICE = """\
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-a
  labels:
    kubernetes.io/service-name: web
addressType: IPv4
endpoints:
- addresses:
  - 10.0.0.1
  conditions: {ready: true}
ports:
- name: http
  port: 8080
"""

ENDPOINTS = """\
apiVersion: v1
kind: Endpoints
metadata:
  name: web
subsets:
- addresses:
  - ip: 10.0.0.1
  ports:
  - name: http
    port: 8080
"""


def service(name: str) -> str:
    return SERVICE.replace("web", name)
