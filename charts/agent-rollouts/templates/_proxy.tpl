{{- define "agent-rollouts.proxyLabels" -}}
{{ include "agent-rollouts.commonLabels" . }}
{{ include "agent-rollouts.proxySelector" . }}
{{- end }}

{{/* Selector labels of the session proxy's pods. They cannot change between versions. */}}
{{- define "agent-rollouts.proxySelector" -}}
app.kubernetes.io/name: agent-rollouts
app.kubernetes.io/component: proxy
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The proxy's settings. The class ProxySettings describes each field. Fails for values that contradict each other. */}}
{{- define "agent-rollouts.proxySettings" -}}
{{- with .Values.proxy -}}
{{- if not .output }}{{ fail "proxy.output: is missing; set the place of sessions, such as {uri: s3://rollouts/sessions}" }}{{ end -}}
{{- if eq (empty .endpoint) (empty .relay) }}{{ fail "proxy: give exactly one of endpoint and relay" }}{{ end -}}
{{- if and .relay (gt (int .replicas) 1) }}{{ fail "proxy.replicas: must be 1 with relay, because a worker connects to one replica" }}{{ end -}}
{{- if eq (empty .adminKey) (empty .adminKeySecret) }}{{ fail "proxy: give exactly one of adminKey and adminKeySecret" }}{{ end -}}
store: {{ .output.uri | toJson }}
{{- with .endpoint }}
endpoint: {{ toJson . }}
{{- end }}
{{- with .relay }}
relay: {{ toJson . }}
{{- end }}
host: 0.0.0.0
port: 8080
{{- end -}}
{{- end }}
