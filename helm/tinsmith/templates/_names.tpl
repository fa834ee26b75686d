{{/* Names, labels, addresses: what more than one object needs. */}}

{{/* The beginning of all names: at most 40 characters, so that names of pods and labels fit. What is
     longer ends in a hash, because two long names must not become one. */}}
{{- define "tinsmith.fullname" -}}
{{- $base := default .Chart.Name .Values.nameOverride -}}
{{- $name := .Values.fullnameOverride -}}
{{- if not $name -}}
{{- $name = contains $base .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $base) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" ($name | trunc 31 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/* Name of one pod's objects. Takes (list . "scheduler"). */}}
{{- define "tinsmith.name" -}}
{{- printf "%s-%s" (include "tinsmith.fullname" (index . 0)) (index . 1) -}}
{{- end }}

{{- define "tinsmith.selectorLabels" -}}
app.kubernetes.io/name: tinsmith
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tinsmith.labels" -}}
{{ include "tinsmith.selectorLabels" . }}
app.kubernetes.io/part-of: tinsmith
app.kubernetes.io/version: {{ (index . 0).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (index . 0).Chart.Name (index . 0).Chart.Version }}
{{- end }}

{{/* Begins the metadata of an object. Takes (list . COMPONENT NAME NAMESPACE). */}}
{{- define "tinsmith.metadata" -}}
name: {{ index . 2 }}
namespace: {{ index . 3 }}
labels:
  {{- include "tinsmith.labels" . | nindent 2 }}
{{- end }}

{{/* The API server's version: what values say, else what the cluster says. */}}
{{- define "tinsmith.kubernetesVersion" -}}
{{- default .Capabilities.KubeVersion.Version .Values.kubernetesVersion -}}
{{- end }}

{{/* "true" from a version on. Takes (list . "1.24"). */}}
{{- define "tinsmith.isFrom" -}}
{{- if semverCompare (printf ">=%s.0-0" (index . 1)) (include "tinsmith.kubernetesVersion" (index . 0)) }}true{{ end -}}
{{- end }}

{{/* The image of a pod, called as its program: the checkpoint server is a trainer. */}}
{{- define "tinsmith.image" -}}
{{- $image := (index . 0).Values.image -}}
{{- $program := eq (index . 1) "checkpoints" | ternary "trainer" (index . 1) -}}
{{- printf "%s/%s:%s" $image.repository $program (default (index . 0).Chart.AppVersion $image.tag) -}}
{{- end }}

{{- define "tinsmith.schedulerAddress" -}}
{{- printf "%s.%s.svc:7070" (include "tinsmith.name" (list . "scheduler")) .Release.Namespace -}}
{{- end }}

{{- define "tinsmith.gatewayAddress" -}}
{{- $address := printf "%s.%s.svc:7077" (include "tinsmith.name" (list . "gateway")) .Release.Namespace -}}
{{- if .Values.gateway.clusterAddress -}}
{{- .Values.gateway.clusterAddress -}}
{{- else -}}
{{- .Values.gateway.tlsSecret | empty | ternary $address (printf "https://%s" $address) -}}
{{- end -}}
{{- end }}

{{/* The Secret with pod-key, the keys of the pods, bootstrap-key and the URLs of databases. */}}
{{- define "tinsmith.secretName" -}}
{{- default (include "tinsmith.name" (list . "keys")) .Values.secrets.existing -}}
{{- end }}

{{/* The Secret with the variables of an S3 client, here and in the namespaces of jobs; empty if there is none. */}}
{{- define "tinsmith.storageSecretName" -}}
{{- if .Values.storage.existingSecret -}}
{{- .Values.storage.existingSecret -}}
{{- else if or .Values.storage.env .Values.s3.enabled -}}
{{- include "tinsmith.name" (list . "storage") -}}
{{- end -}}
{{- end }}

{{/* The Secret with the token of the hub; empty if there is none. */}}
{{- define "tinsmith.hubSecretName" -}}
{{- if .Values.models.hubToken.existingSecret -}}
{{- .Values.models.hubToken.existingSecret -}}
{{- else if .Values.models.hubToken.token -}}
{{- include "tinsmith.name" (list . "hub") -}}
{{- end -}}
{{- end }}

{{- define "tinsmith.storageUri" -}}
{{- .Values.s3.enabled | ternary "s3://tinsmith" .Values.storage.uri -}}
{{- end }}

{{/* What values must have and no schema can say. Included by the controller, which every install has. */}}
{{- define "tinsmith.check" -}}
{{- $urls := .Values.database.urls -}}
{{- $hasUrls := and $urls.scheduler $urls.gateway $urls.coordinator $urls.trainer -}}
{{- if not (or .Values.secrets.existing .Values.database.url $hasUrls .Values.postgresql.enabled) -}}
{{- fail "no database: set database.url (or all of database.urls) to a PostgreSQL, or secrets.existing, or postgresql.enabled=true to try things out" -}}
{{- end -}}
{{- if and .Values.postgresql.enabled (or .Values.secrets.existing .Values.database.url $urls) -}}
{{- fail "two databases: postgresql.enabled makes one, so leave database and secrets.existing empty" -}}
{{- end -}}
{{- if and .Values.secrets.existing (or .Values.database.url $urls) -}}
{{- fail "two databases: those of the Secret secrets.existing are used, so leave database.url and urls empty" -}}
{{- end -}}
{{- if not (or .Values.storage.uri .Values.s3.enabled) -}}
{{- fail "no object store: set storage.uri to s3://bucket/prefix, or s3.enabled=true to try things out" -}}
{{- end -}}
{{- $isFile := hasPrefix "file://" .Values.storage.uri -}}
{{- if and $isFile (not .Values.storage.persistentVolumeClaim) -}}
{{- fail "storage.uri is a folder: name the claim that has it, in storage.persistentVolumeClaim" -}}
{{- end -}}
{{- if and .Values.storage.persistentVolumeClaim (not $isFile) -}}
{{- fail "storage.persistentVolumeClaim is for shared files: set storage.uri to file:///storage, or leave the claim out" -}}
{{- end -}}
{{- if and $isFile (or .Values.storage.existingSecret .Values.storage.env) -}}
{{- fail "storage.existingSecret and storage.env are of an S3 client: storage.uri is a folder, so leave them out" -}}
{{- end -}}
{{- if and .Values.s3.enabled (or .Values.storage.uri .Values.storage.env .Values.storage.existingSecret) -}}
{{- fail "two object stores: s3.enabled makes one, so leave storage empty" -}}
{{- end -}}
{{- if and .Values.storage.existingSecret .Values.storage.env -}}
{{- fail "storage.existingSecret and storage.env exclude each other" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.jobs.namespaces -}}
{{- if has .name $names -}}
{{- fail (printf "jobs.namespaces names %s twice" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range $pool, $settings := .Values.pools -}}
{{- if and $settings.namespace (not (has $settings.namespace $names)) -}}
{{- fail (printf "pools.%s.namespace %s is not one of jobs.namespaces" $pool $settings.namespace) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Namespaces of jobs, separated by commas. */}}
{{- define "tinsmith.namespaces" -}}
{{- $entries := list -}}
{{- range .Values.jobs.namespaces -}}
{{- $entries = append $entries .name -}}
{{- end -}}
{{- join "," $entries -}}
{{- end }}

{{/* The project of each namespace of jobs, `namespace=project,...`. */}}
{{- define "tinsmith.projectsOfNamespaces" -}}
{{- $entries := list -}}
{{- range .Values.jobs.namespaces -}}
{{- $entries = append $entries (printf "%s=%s" .name .project) -}}
{{- end -}}
{{- join "," $entries -}}
{{- end }}

{{/* Where each project's jobs are created, `project=namespace,...`: the first of its namespaces. */}}
{{- define "tinsmith.namespacesOfProjects" -}}
{{- $entries := list -}}
{{- $projects := list -}}
{{- range .Values.jobs.namespaces -}}
{{- if not (has .project $projects) -}}
{{- $projects = append $projects .project -}}
{{- $entries = append $entries (printf "%s=%s" .project .name) -}}
{{- end -}}
{{- end -}}
{{- join "," $entries -}}
{{- end }}

{{- define "tinsmith.autoscalingVersion" -}}
{{- if include "tinsmith.isFrom" (list . "1.23") }}autoscaling/v2{{ else }}autoscaling/v2beta2{{ end -}}
{{- end }}
