{{/* What is the same in every pod. All take (list . "scheduler"), the pod's settings being those of that name. */}}

{{/* Metadata of a pod's template. What a pod reads besides its variables is in a checksum, so that a change
     replaces the pod. Generated keys are not: they never change. */}}
{{- define "tinsmith.podMetadata" -}}
{{- $root := index . 0 -}}
{{- $settings := index $root.Values (index . 1) -}}
annotations:
  checksum/secrets: {{ list $root.Values.secrets.existing $root.Values.database.url $root.Values.database.urls | toJson | sha256sum }}
  checksum/settings: {{ include "tinsmith.settings" $settings.settings | sha256sum }}
  {{- if eq (index . 1) "checkpoints" }}
  checksum/storage: {{ list $root.Values.storage.existingSecret $root.Values.storage.env | toJson | sha256sum }}
  {{- end }}
  {{- with $settings.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- include "tinsmith.labels" . | nindent 2 }}
  tinsmith.dev/metrics: "true"
  {{- with $settings.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Where and as whom a pod runs. */}}
{{- define "tinsmith.podSpec" -}}
{{- $root := index . 0 -}}
{{- $settings := index $root.Values (index . 1) -}}
serviceAccountName: {{ include "tinsmith.name" . }}
automountServiceAccountToken: {{ has (index . 1) (list "controller" "scheduler") }}
# Variables of Services would begin with TINSMITH_ where the release is called so, and be taken for settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $settings.drainTimeoutSeconds $settings.drainMarginSeconds }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile:
    type: RuntimeDefault
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tinsmith.selectorLabels" . | nindent 8 }}
tolerations:
  {{- range list "not-ready" "unreachable" }}
  - key: node.kubernetes.io/{{ . }}
    operator: Exists
    effect: NoExecute
    tolerationSeconds: {{ $root.Values.nodeLossSeconds }}
  {{- end }}
  {{- with $settings.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $settings.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end }}

{{/* Image, rights and resources of a pod's container. */}}
{{- define "tinsmith.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: {{ include "tinsmith.image" . }}
args: [--config, /etc/tinsmith/settings/{{ index . 1 }}.toml]
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- include "tinsmith.containerSecurityContext" $root | nindent 2 }}
resources:
  {{- toYaml (index $root.Values (index . 1)).resources | nindent 2 }}
terminationMessagePolicy: FallbackToLogsOnError
volumeMounts:
  - name: tmp
    mountPath: /tmp
  - name: data
    mountPath: /var/lib/tinsmith
  - name: settings
    mountPath: /etc/tinsmith/settings
    readOnly: true
  {{- if $root.Values.tls.enabled }}
  - name: certificates
    mountPath: /etc/tinsmith/certificates
    readOnly: true
  {{- end }}
{{- end }}

{{- define "tinsmith.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* All that a pod can write to, and its settings. What must last is in the database. */}}
{{- define "tinsmith.volumes" -}}
{{- $root := index . 0 -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: data
  emptyDir:
    sizeLimit: {{ default "1Gi" (index $root.Values (index . 1)).scratchSize }}
- name: settings
  configMap:
    name: {{ include "tinsmith.name" (list $root "settings") }}
{{- if $root.Values.tls.enabled }}
- name: certificates
  secret:
    secretName: {{ include "tinsmith.name" (list $root "pods") }}-{{ ternary "trainer" (index . 1) (eq (index . 1) "checkpoints") }}
{{- end }}
{{- end }}

{{/* Variables of every pod. */}}
{{- define "tinsmith.env" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: TINSMITH_METRICS_ADDRESS
  value: $(POD_IP):9090
- name: TINSMITH_TERMINATION_LOG
  value: /dev/termination-log
{{- if $root.Values.tls.enabled }}
- name: TINSMITH_POD_CERTIFICATE
  value: /etc/tinsmith/certificates/tls.crt
- name: TINSMITH_POD_CERTIFICATE_KEY
  value: /etc/tinsmith/certificates/tls.key
- name: TINSMITH_POD_AUTHORITY
  value: /etc/tinsmith/certificates/ca.crt
{{- end }}
{{- $roots := list "scheduler" "controller" }}
- name: TINSMITH_POD_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "tinsmith.secretName" $root }}
      key: {{ ternary "pod-key" (printf "%s-key" (ternary "trainer" $component (eq $component "checkpoints"))) (has $component $roots) }}
{{- if has $component $roots }}
- name: TINSMITH_PREVIOUS_POD_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "tinsmith.secretName" $root }}
      key: previous-pod-key
      optional: true
{{- end }}
{{- end }}

{{/* The key of a pod, derived from the root secret as tinsmith_runtime/rpc/pod_identity.py says.
     Takes (list ROOT ROLE NAMESPACE). */}}
{{- define "tinsmith.podKey" -}}
{{- $id := printf "tsp_%s_%s_" (index . 1) (index . 2) -}}
{{- $inner := printf "%s\ntinsmith pod key\n%s" (index . 0) $id | sha256sum -}}
{{- printf "%s_%s" $id (printf "%s\n%s" (index . 0) $inner | sha256sum) -}}
{{- end }}

{{/* A key of users with its check, as tinsmith_runtime/rpc/key_checks.py says. Takes (list ROOT ID SECRET). */}}
{{- define "tinsmith.userKey" -}}
{{- $checks := printf "%s\n%s" (index . 0) (printf "%s\ntinsmith key check" (index . 0) | sha256sum) | sha256sum -}}
{{- $inner := printf "%s\n%s\n%s" $checks (index . 1) (index . 2 | sha256sum) | sha256sum -}}
{{- printf "tsk_%s_%s%s" (index . 1) (index . 2) (printf "%s\n%s" $checks $inner | sha256sum | trunc 12) -}}
{{- end }}

{{- define "tinsmith.drainEnv" -}}
- name: TINSMITH_DRAIN_TIMEOUT_S
  value: {{ (index (index . 0).Values (index . 1)).drainTimeoutSeconds | quote }}
{{- end }}

{{- define "tinsmith.schedulerEnv" -}}
- name: TINSMITH_SCHEDULER_ADDRESS
  value: {{ include "tinsmith.schedulerAddress" . }}
{{- end }}

{{/* Takes (list . ROLE); each role has a database URL of its own. */}}
{{- define "tinsmith.databaseEnv" -}}
- name: TINSMITH_DATA_DIR
  value: /var/lib/tinsmith
- name: TINSMITH_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "tinsmith.secretName" (index . 0) }}
      key: {{ index . 1 }}-database-url
{{- end }}

{{/* How gRPC's health check is asked. Takes (list . PORT). Kubernetes does it itself from 1.24 on; before, a
     program in the pod does. Pods that ask for a certificate, which Kubernetes has not, say it beside their
     metrics. */}}
{{- define "tinsmith.grpcProbe" -}}
{{- if (index . 0).Values.tls.enabled -}}
httpGet:
  path: /healthz
  port: metrics
{{- else if include "tinsmith.isFrom" (list (index . 0) "1.24") -}}
grpc:
  port: {{ index . 1 }}
{{- else -}}
exec:
  command: [python, -m, tinsmith_runtime.rpc.health_probe]
{{- end -}}
{{- end }}

{{/* Takes (list HOW-TO-ASK SECONDS-TO-START). */}}
{{- define "tinsmith.probes" -}}
startupProbe:
  {{- index . 0 | nindent 2 }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (index . 1) 2 }}
readinessProbe:
  {{- index . 0 | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  {{- index . 0 | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end }}

{{/* Of pods of which one works at a time. Standing by is a part of the start and lasts as long as another
     process works: nobody is killed for waiting, not in 130 years. */}}
{{- define "tinsmith.singleWriterProbes" -}}
{{- include "tinsmith.probes" (list . 4294967294) }}
{{- end }}

{{/* The strategy of pods of which one works at a time. The new one is never ready before the old one has
     ended, so waiting for that would last for ever: the old one goes while the new one starts. */}}
{{- define "tinsmith.singleWriterStrategy" -}}
type: RollingUpdate
rollingUpdate:
  maxSurge: 1
  maxUnavailable: 100%
{{- end }}

{{/* Further settings of a pod as TOML. A file and not variables, because a pod refuses a file with a setting
     that it does not know. Numbers in values have no type: what is whole is written without a point. */}}
{{- define "tinsmith.settings" -}}
{{- range $name, $value := . }}
{{- if and (kindIs "float64" $value) (eq (floor $value) $value) }}
{{ $name }} = {{ int64 $value }}
{{- else }}
{{ $name }} = {{ $value | toJson }}
{{- end }}
{{- end }}
{{- end }}
