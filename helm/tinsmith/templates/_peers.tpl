{{/* Peers of network policies. Inside one release or job nothing talks to anything unless it is named here. */}}

{{/* Begins a policy. Takes (list . COMPONENT NAME NAMESPACE). */}}
{{- define "tinsmith.policy" -}}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "tinsmith.metadata" . | nindent 2 }}
{{- end }}

{{/* Pods of this release, from anywhere. Takes (list . "gateway" "scheduler" ...). */}}
{{- define "tinsmith.podsPeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ (index . 0).Release.Namespace }}
  podSelector:
    matchLabels:
      app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ rest . | toJson }}}
{{- end }}

{{/* Pods of jobs and pools by their roles, in all namespaces of jobs. Takes (list . "trainer" ...). */}}
{{- define "tinsmith.rolesPeer" -}}
{{- $names := list -}}
{{- range (index . 0).Values.jobs.namespaces -}}
{{- $names = append $names .name -}}
{{- end -}}
- namespaceSelector:
    matchExpressions:
      - {key: kubernetes.io/metadata.name, operator: In, values: {{ $names | toJson }}}
  podSelector:
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: {{ rest . | toJson }}}
{{- end }}

{{/* Takes (list (list CIDR ...) PORT ...). */}}
{{- define "tinsmith.addressesRule" -}}
to:
  {{- range index . 0 }}
  - ipBlock: {cidr: {{ . }}}
  {{- end }}
{{ include "tinsmith.ports" (rest .) }}
{{- end }}

{{- define "tinsmith.ports" -}}
ports:
  {{- range . }}
  - {protocol: TCP, port: {{ int . }}}
  {{- end }}
{{- end }}

{{- define "tinsmith.databaseRule" -}}
{{- if .Values.postgresql.enabled -}}
to:
  {{- include "tinsmith.podsPeer" (list . "postgresql") | nindent 2 }}
{{ include "tinsmith.ports" (list 5432) }}
{{- else -}}
{{- include "tinsmith.addressesRule" (list .Values.database.cidrs .Values.database.port) }}
{{- end -}}
{{- end }}

{{/* Object store and model hub. */}}
{{- define "tinsmith.storageRules" -}}
- {{ include "tinsmith.addressesRule" (prepend .Values.storage.ports .Values.storage.cidrs) | nindent 2 | trim }}
{{- if .Values.s3.enabled }}
- to:
    {{- include "tinsmith.podsPeer" (list . "s3") | nindent 4 }}
  {{- include "tinsmith.ports" (list 7070) | nindent 2 }}
{{- end }}
{{- end }}

{{- define "tinsmith.schedulerRule" -}}
to:
  {{- include "tinsmith.podsPeer" (list . "scheduler") | nindent 2 }}
{{ include "tinsmith.ports" (list 7070) }}
{{- end }}

{{- define "tinsmith.apiServerRule" -}}
{{- include "tinsmith.addressesRule" (prepend .Values.networkPolicy.apiServer.ports .Values.networkPolicy.apiServer.cidrs) }}
{{- end }}

{{- define "tinsmith.dnsRule" -}}
to:
  {{- toYaml .Values.networkPolicy.dnsTo | nindent 2 }}
ports:
  {{- range .Values.networkPolicy.dnsPorts }}
  - {protocol: UDP, port: {{ int . }}}
  - {protocol: TCP, port: {{ int . }}}
  {{- end }}
{{- end }}

{{/* Nothing in, nothing out but names, and metrics for those who may read them. Takes
     (list . NAME-PREFIX NAMESPACE POD-SELECTOR). */}}
{{- define "tinsmith.defaultDeny" -}}
{{- $root := index . 0 }}
{{ include "tinsmith.policy" (list $root "network" (printf "%s-default-deny" (index . 1)) (index . 2)) }}
spec:
  podSelector: {{ index . 3 | toJson }}
  policyTypes: [Ingress, Egress]
  egress:
    - {{ include "tinsmith.dnsRule" $root | nindent 6 | trim }}
  {{- with $root.Values.networkPolicy.metricsFrom }}
  ingress:
    - from:
        {{- toYaml . | nindent 8 }}
      ports:
        - {protocol: TCP, port: 9090}
  {{- end }}
{{- end }}
