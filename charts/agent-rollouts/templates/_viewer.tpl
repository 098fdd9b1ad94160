{{- define "agent-rollouts.viewerLabels" -}}
{{ include "agent-rollouts.commonLabels" . }}
{{ include "agent-rollouts.viewerSelector" . }}
{{- end }}

{{/* Selector labels of the viewer's pod. They cannot change between versions. */}}
{{- define "agent-rollouts.viewerSelector" -}}
app.kubernetes.io/name: agent-rollouts
app.kubernetes.io/component: viewer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}
