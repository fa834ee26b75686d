{{/* What the two small servers for trials have in common. Both take (list . "postgresql"). */}}

{{- define "tinsmith.trialPodSpec" -}}
{{- $user := (index (index . 0).Values (index . 1)).runAs | int -}}
serviceAccountName: {{ include "tinsmith.name" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: 60
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $user }}
  runAsGroup: {{ $user }}
  fsGroup: {{ $user }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end }}

{{- define "tinsmith.trialVolume" -}}
{{- $settings := index (index . 0).Values (index . 1) -}}
volumeClaimTemplates:
  - metadata:
      name: data
      labels:
        {{- include "tinsmith.selectorLabels" . | nindent 8 }}
    spec:
      accessModes: [ReadWriteOnce]
      {{- with $settings.storageClassName }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ $settings.size }}
{{- end }}
