{{/* Names and labels of the operator's objects. */}}
{{- define "operator.name" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- $both := contains $chart .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $chart) -}}
{{- .Values.fullnameOverride | default $both | trunc 50 | trimSuffix "-" -}}
{{- end }}

{{/* The account that the operator runs as. */}}
{{- define "operator.serviceAccount" -}}
{{- $name := .Values.serviceAccount.name | default "" -}}
{{- if and (not $name) (not (dig "create" true .Values.serviceAccount)) }}{{ fail "serviceAccount.name is empty: without serviceAccount.create it must name an account of the namespace, to which the operator's roles are bound" }}{{ end -}}
{{- $name | default (include "operator.name" .) -}}
{{- end }}

{{/* No override changes these: the network policies of training pods know the operator's pods by them. */}}
{{- define "operator.selector" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "operator.labels" -}}
{{ include "operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: rljob
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "operator.image" -}}
{{- if .Values.image.digest }}{{ .Values.image.repository }}@{{ .Values.image.digest }}{{ else }}{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end -}}
{{- end }}

{{/* Whether the values are those of an older chart (`helm upgrade --reuse-values`): what is new here is missing there, and not emptied. */}}
{{- define "operator.olderValues" -}}
{{- if not (hasKey .Values.serviceAccount "create") }}true{{ end -}}
{{- end }}

{{- define "operator.podSecurityContext" -}}
{{- $context := .Values.podSecurityContext | default dict -}}
{{- if include "operator.olderValues" . -}}
{{- $context = merge $context (dict "runAsNonRoot" true "runAsUser" 65532 "runAsGroup" 65532 "fsGroup" 65532 "seccompProfile" (dict "type" "RuntimeDefault")) -}}
{{- end -}}
{{- with $context }}{{ toYaml . }}{{ end -}}
{{- end }}

{{- define "operator.securityContext" -}}
{{- $context := .Values.securityContext | default dict -}}
{{- if include "operator.olderValues" . -}}
{{- $context = merge $context (dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true "capabilities" (dict "drop" (list "ALL"))) -}}
{{- end -}}
{{- with $context }}{{ toYaml . }}{{ end -}}
{{- end }}

{{/* Made and kept by the operator. */}}
{{- define "operator.keySecret" -}}
{{- printf "%s-keys" (include "operator.name" .) -}}
{{- end }}

{{/* What the operator may do in every namespace it watches. No verb and no resource is a wildcard. */}}
{{- define "operator.rules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
- apiGroups: [rljob.dev]
  # Owner references that block deletion ask for this.
  resources: [rljobs/finalizers]
  verbs: [update]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  # Whether the claims that jobs name exist, and can be shared by pods on several nodes.
  resources: [persistentvolumeclaims]
  verbs: [get, list, watch]
- apiGroups: [""]
  # For dry runs: pods are checked before anything is created. Nothing ever runs from a PodTemplate.
  resources: [podtemplates]
  verbs: [create]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, patch]
- apiGroups: [""]
  # Create and no more: tokens are derived, and answers to patches and deletions would show anybody's Secrets.
  resources: [secrets]
  verbs: [create]
- apiGroups: [kueue.x-k8s.io]
  # Why a job waits in its queue.
  resources: [workloads]
  verbs: [get, list, watch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  # The claim of a namespace, by which two operators notice each other; creating cannot be limited to a name.
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [rljobs.rljob.dev]
  verbs: [get, update, delete]
{{- end }}
