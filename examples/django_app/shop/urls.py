"""The pages of the project."""

from django.contrib import admin
from django.urls import path
from orders import views

urlpatterns = [
    path("admin/", admin.site.urls),
    path("customers/<slug:name>", views.show),
    path("customers/<slug:name>/orders", views.place),
]
