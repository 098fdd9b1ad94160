{{/* Labels of everything in this chart. */}}
{{- define "agent-rollouts.labels" -}}
{{ include "agent-rollouts.commonLabels" . }}
{{ include "agent-rollouts.selector" . }}
{{- end }}

{{- define "agent-rollouts.commonLabels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Selector labels of the operator's pods. They cannot change between versions. */}}
{{- define "agent-rollouts.selector" -}}
app.kubernetes.io/name: agent-rollouts
app.kubernetes.io/component: operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Name of cluster-scoped objects. Names of namespaces and releases have no colon, so two releases never share a name. */}}
{{- define "agent-rollouts.clusterName" -}}
{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end }}

{{/*
Rights of the operator in the namespaces of RolloutJobs. The creator of a Role must have all rights that it grants, so
some rules for rollout.dev are only for the Role of runners.
*/}}
{{- define "agent-rollouts.rules" -}}
- apiGroups: [rollout.dev]
  resources: [rolloutjobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rollout.dev]
  resources: [sandboxes]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rollout.dev]
  resources: [sandboxpools]
  verbs: [get, list, watch]
- apiGroups: [rollout.dev]
  resources: [modelservers]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rollout.dev]
  resources: [rolloutshards]
  verbs: [get, list, watch, create]
- apiGroups: [rollout.dev]
  resources: [rolloutjobs/status, rolloutshards/status, sandboxes/status, sandboxpools/status, modelservers/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, delete]
# For the readiness gate of model servers: only the operator knows whether a server has the current policy.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, update, patch]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, watch, create, update, patch]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, update, delete]
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, watch, create, update]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, update, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, create]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, update]
- apiGroups: [""]
  resources: [events]
  verbs: [create, patch]
{{- end }}

{{/* The operator's configuration. The class OperatorConfig describes each field. */}}
{{- define "agent-rollouts.config" -}}
{{- with .Values -}}
images: {{ pick .images "runtime" "executor" "pullPolicy" | toJson }}
lease: {{ dict "namespace" $.Release.Namespace "name" $.Release.Name | toJson }}
defaults: {{ .defaults | toJson }}
runner: {{ .runner | toJson }}
{{- with .dns }}
dns: {{ . | toJson }}
{{- end }}
privilegedNamespaces: {{ .privilegedNamespaces | toJson }}
watch: {{ .watch | toJson }}
{{- if .admission.enabled }}
admission: {port: 9443, certificates: /etc/agent-rollouts-admission}
{{- end }}
budgets: {{ .budgets | toJson }}
workers: {{ .workers }}
resyncSeconds: {{ .resyncSeconds }}
metricsPort: 8080
healthPort: 8081
{{- end -}}
{{- end }}
